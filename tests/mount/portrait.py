"""A tree as users can tell it from another: type, mode, owner, links, times, xattrs and content of every name."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

Row = dict[str, object]


def portrait(top: Path) -> dict[str, Row]:
    """One row a name below `top`, and one of `top` itself. Hard links are told by the first name of their inode."""
    first: dict[int, str] = {}
    rows: dict[str, Row] = {}
    names = [b""]
    for folder, dirs, files in os.walk(os.fsencode(top)):
        names += [os.path.relpath(os.path.join(folder, name), os.fsencode(top)) for name in sorted(dirs + files)]
    for name in sorted(names):
        path = os.path.join(os.fsencode(top), name)
        shown = name.decode("utf-8", "backslashreplace") or "."
        rows[shown] = _row(path, first, shown)
    return rows


def _row(path: bytes, first: dict[int, str], name: str) -> Row:
    st = os.lstat(path)
    row: Row = {
        "type": stat.filemode(st.st_mode),
        "owner": (st.st_uid, st.st_gid),
        "mtime_ns": st.st_mtime_ns,
        "xattrs": {
            key: os.getxattr(path, key, follow_symlinks=False)
            for key in sorted(os.listxattr(path, follow_symlinks=False))
            if not key.startswith("user.aof2.")
        },
    }
    if not stat.S_ISDIR(st.st_mode):
        row["nlink"] = st.st_nlink
        row["same as"] = first.setdefault(st.st_ino, name)
    if stat.S_ISREG(st.st_mode):
        row["size"] = st.st_size
        row["sha256"] = _sha256(path)
    if stat.S_ISLNK(st.st_mode):
        row["target"] = os.readlink(path)
    if stat.S_ISBLK(st.st_mode) or stat.S_ISCHR(st.st_mode):
        row["device"] = (os.major(st.st_rdev), os.minor(st.st_rdev))
    return row


def _sha256(path: bytes) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def differences(a: dict[str, Row], b: dict[str, Row], *, but: tuple[str, ...] = ()) -> list[str]:
    """What is not the same, a line each."""
    out = [f"{name}: only in the first" for name in a.keys() - b.keys()]
    out += [f"{name}: only in the second" for name in b.keys() - a.keys()]
    for name in a.keys() & b.keys():
        keys = (a[name].keys() | b[name].keys()) - set(but)
        out += [
            f"{name}: {k}: {a[name].get(k)!r} and {b[name].get(k)!r}"
            for k in sorted(keys)
            if a[name].get(k) != b[name].get(k)
        ]
    return sorted(out)
