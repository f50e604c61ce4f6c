"""Packaging that pyproject.toml cannot say: three top folders install as three packages of `aof2`.

`fs/`, `engine/` and `native/` stay at the top of the tree, and become `aof2.fs`, `aof2.engine` and
`aof2.native`, so nothing collides with other projects' `fs`. The C core is built by cffi in API mode; beside it
lies `aof2-channel`, the executable of `native/channel/`.

Spark finds a data source by a file named `pyspark_*` in a folder of sys.path. `pyspark_aof2` is therefore a module of
its own beside `aof2`; its source is in `engine/spark/`.
"""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_ext import build_ext

TOP = ("fs", "engine", "native")
CHANNEL = "aof2-channel"
SPARK = "engine/spark"
SPARK_MODULE = "pyspark_aof2"
HARDENED = ["-fstack-protector-strong", "-D_FORTIFY_SOURCE=2", "-fPIE"]
COMPILE = ["-O2", "-std=c11", "-Wall", "-Wextra", "-pthread", "-D_GNU_SOURCE", "-U_FORTIFY_SOURCE", *HARDENED]
CORE = [f"native/{name}.c" for name in ("crc", "crc_x86", "lines", "segment")]  # what the channel has of the C core
LIBRARIES = ["lmdb"]
LINK = ["-pie", "-pthread", "-Wl,-z,relro,-z,now", "-Wl,-z,noexecstack"]

packages = [f"aof2.{top}{'.' + sub if sub else ''}" for top in TOP for sub in ["", *find_packages(top)]]


class BuildExt(build_ext):
    """The cffi module as ever, then the channel beside it: in the tree for an editable install, in the wheel else."""

    def run(self):
        """Spark lists folders and does not ask an editable install's finder: the module goes there as a file."""
        super().run()
        if self.editable_mode:
            shutil.copy2(f"{SPARK}/{SPARK_MODULE}.py", self.get_finalized_command("install").install_lib)

    def build_extensions(self):
        super().build_extensions()
        sources = [*CORE, *sorted(str(path) for path in Path("native/channel").glob("*.c"))]
        folder = Path(self.build_lib, "aof2", "native")
        folder.mkdir(parents=True, exist_ok=True)
        objects = self.compiler.compile(sources, output_dir=f"{self.build_temp}/channel", extra_postargs=COMPILE)
        self.compiler.link_executable(
            objects, CHANNEL, output_dir=str(folder), libraries=LIBRARIES, extra_postargs=LINK
        )

    def copy_extensions_to_source(self):
        super().copy_extensions_to_source()
        target = Path("native", CHANNEL)
        target.unlink(missing_ok=True)  # it may be running
        shutil.copy2(Path(self.build_lib, "aof2", "native", CHANNEL), target)


setup(
    packages=packages,
    package_dir={"": SPARK, **{f"aof2.{top}": top for top in TOP}},
    py_modules=[SPARK_MODULE],
    options={"egg_info": {"egg_base": "."}},
    package_data={
        "aof2.engine": ["*.md"],
        "aof2.fs": ["helpers/*", "report/*.css"],
        "aof2.native": ["*.h", "*.c", "channel/*.h", "channel/*.c", "channel/*.md"],
    },
    cffi_modules=["native/build.py:ffibuilder"],
    cmdclass={"build_ext": BuildExt},
)
