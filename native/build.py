"""Builds `aof2.native._native` with cffi in API mode; setup.py runs this.

native.h is the one declaration of the C API: what cffi is told is that file without its preprocessor lines.
"""

from pathlib import Path

from cffi import FFI

# setuptools wants paths relative to setup.py, which is where it runs this from.
NATIVE = Path("native")


def cdef_of(header: str) -> str:
    """A header's declarations alone."""
    return "\n".join(line for line in header.splitlines() if not line.startswith("#"))


ffibuilder = FFI()
ffibuilder.cdef(cdef_of((NATIVE / "native.h").read_text()))
ffibuilder.set_source(
    "aof2.native._native",
    '#include "native.h"',
    include_dirs=[str(NATIVE)],
    sources=sorted(str(path) for path in NATIVE.glob("*.c") if path.name != "_native.c"),
    depends=sorted(str(path) for path in NATIVE.glob("*.h")),
    libraries=["crypto"],
    define_macros=[("_GNU_SOURCE", None)],
    extra_compile_args=["-O3", "-std=c11", "-Wall", "-Wextra"],
)
