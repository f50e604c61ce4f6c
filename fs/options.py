"""What `-o a,b=c` may say. Options of mount(8), fstab and systemd that mean nothing here are passed over in silence.

Owner: plain data. A crash leaves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from aof2.engine.errors import Aof2Error

FSNAME: Final = "aof2"

# option → (field, value)
_FLAGS: Final[dict[str, tuple[str, bool]]] = {
    "ro": ("ro", True),
    "rw": ("ro", False),
    "allow_other": ("allow_other", True),
    "noallow_other": ("allow_other", False),
    "nosuid": ("suid", False),
    "suid": ("suid", True),
    "nodev": ("dev", False),
    "dev": ("dev", True),
    "noexec": ("exec", False),
    "exec": ("exec", True),
    "nopassthrough": ("passthrough", False),
    "follow": ("follow", True),
}
_NUMBERS: Final = {"uid": 10, "gid": 10, "umask": 8}
# fmt: off
_IGNORED: Final = frozenset((
    "_netdev", "async", "atime", "auto", "default_permissions", "defaults", "diratime", "dirsync", "group", "iversion",
    "lazytime", "loud", "mand", "noatime", "noauto", "nodiratime", "nofail", "nogroup", "noiversion", "nolazytime",
    "nomand", "noowner", "norelatime", "nostrictatime", "nosymfollow", "nouser", "nousers", "owner", "relatime",
    "silent", "strictatime", "sync", "user", "users",
))
# fmt: on
_IGNORED_PREFIXES: Final = ("x-", "X-", "comment=", "user=", "subtype=", "helper=", "uhelper=")


class OptionsError(Aof2Error):
    """An option that does not exist, or a value that it cannot have. The message is the whole line."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How the mount behaves. Permissions are always checked by the kernel (default_permissions).

    `ro` stops changes through the mount only; the engine goes on with what it has to do. `allow_other`: every user may
    come in, as far as the permissions of files let them; otherwise the one who mounted, alone.
    `follow`: the volume as its writer, on another machine, leaves it in the remote; always read-only.
    `take`: a state_dir that followed becomes the writer's, also where the volume's writer has not left.
    `uid`, `gid` and `umask` say how everything looks, whatever is stored; None: as it is.
    """

    ro: bool = False
    allow_other: bool = False
    uid: int | None = None
    gid: int | None = None
    umask: int | None = None
    suid: bool = False
    dev: bool = False
    exec: bool = True
    passthrough: bool = True
    follow: bool = False
    take: bool = False
    fsname: str = FSNAME
    conf: Path | None = None


def parse_options(given: Iterable[str]) -> Options:
    """The options of every `-o`, in order: later ones win. OptionsError for one that does not exist."""
    fields: dict[str, Any] = {}
    for option in (part.strip() for text in given for part in text.split(",")):
        if option and option not in _IGNORED and not option.startswith(_IGNORED_PREFIXES):
            name, value = _parse(option)
            fields[name] = value
    if fields.get("follow"):
        fields["ro"] = True
    return Options(**fields)


def _parse(option: str) -> tuple[str, object]:
    if option in _FLAGS:
        return _FLAGS[option]
    name, has_value, value = option.partition("=")
    if has_value and name in _NUMBERS:
        return name, _number(name, value)
    if has_value and name == "fsname":
        if not value or any(not c.isprintable() or c.isspace() for c in value):
            raise OptionsError(f"-o {option!r}: a name without spaces must follow fsname=")
        return name, value
    if has_value and name == "conf":
        if not value:
            raise OptionsError("-o conf=: a file must follow")
        return name, Path(value)
    known = ", ".join((*_FLAGS, *(f"{n}=" for n in (*_NUMBERS, "fsname", "conf"))))
    raise OptionsError(f"-o {option!r}: no such option; there are {known}")


def _number(name: str, value: str) -> int:
    base = _NUMBERS[name]
    most = 0o777 if base == 8 else 0xFFFFFFFE
    if not re.fullmatch("[0-7]+" if base == 8 else "[0-9]+", value) or int(value, base) > most:
        allowed = "an octal number up to 777" if base == 8 else "a number"
        raise OptionsError(f"-o {name}={value}: it must be {allowed}")
    return int(value, base)
