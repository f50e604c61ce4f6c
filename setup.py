"""Packaging that pyproject.toml cannot say: three top folders install as three packages of `aof2`.

`fs/`, `engine/` and `native/` stay at the top of the tree, and become `aof2.fs`, `aof2.engine` and
`aof2.native`, so nothing collides with other projects' `fs`. The C core is built by cffi in API mode.
"""

from setuptools import find_packages, setup

TOP = ("fs", "engine", "native")

packages = [f"aof2.{top}{'.' + sub if sub else ''}" for top in TOP for sub in ["", *find_packages(top)]]

setup(
    packages=packages,
    package_dir={f"aof2.{top}": top for top in TOP},
    package_data={"aof2.engine": ["*.md"], "aof2.native": ["*.h", "*.c"]},
    cffi_modules=["native/build.py:ffibuilder"],
)
