"""What the one who mounts lacks: said in one line, with the command that mends it, before anything is opened.

Root mounts by itself. Any other user mounts through fusermount3, and needs what distributions give: a /dev/fuse that
may be opened, fusermount3 with its setuid bit, folders of his own. Each line says what is missing and what to run.

Owner: the `aof2 mount` process, before it forks; stateless. A crash leaves nothing.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import re
import shlex
import shutil
import stat
from pathlib import Path
from typing import Final

from aof2.engine.settings import Settings
from aof2.fs.mountpoint import NO_DAEMON, MountError
from aof2.fs.options import Options

DEVICE: Final = Path("/dev/fuse")
FUSE_CONF: Final = Path("/etc/fuse.conf")
HELPER: Final = "fusermount3"


def check_privileges(options: Options, *, device: Path = DEVICE) -> None:
    """MountError, with what to run, when this user cannot mount at all, or not so."""
    _check_device(device)
    if os.geteuid() != 0:
        _check_helper()
        _check_options(options)


def sudo(*words: str) -> str:
    """The command as the user types it; root needs no sudo."""
    return ("" if os.geteuid() == 0 else "sudo ") + shlex.join(words)


def _check_device(device: Path) -> None:
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except PermissionError as e:
        if os.geteuid() == 0:
            raise MountError(f"{device}: {(e.strerror or '').lower()}; allow this container the device") from None
        raise MountError(f"{device}: this user may not open it; run: {sudo('chmod', '666', str(device))}") from None
    except OSError as e:
        if e.errno not in (errno.ENOENT, errno.ENODEV, errno.ENXIO):
            raise MountError(f"{device}: {(e.strerror or str(e)).lower()}") from None
        raise MountError(f"{device}: there is none; run: {sudo('modprobe', 'fuse')}") from None


def _check_helper() -> None:
    found = shutil.which(HELPER)
    if found is None:
        run = sudo("apt-get", "install", "-y", "fuse3")
        raise MountError(f"{HELPER}: not installed, and only root mounts without it; run: {run}")
    info = Path(found).stat()
    if info.st_uid != 0 or not info.st_mode & stat.S_ISUID:
        run = f"{sudo('chown', 'root', found)} && {sudo('chmod', '4755', found)}"
        raise MountError(f"{found}: not setuid root, so it cannot mount for this user; run: {run}")


def _check_options(options: Options) -> None:
    for name, wanted in (("suid", options.suid), ("dev", options.dev)):
        if wanted:
            raise MountError(f"-o {name}: only root may mount with it; leave it out")
    if options.allow_other and not _others_allowed():
        run = f"echo user_allow_other | {sudo('tee', '-a', str(FUSE_CONF))}"
        raise MountError(f"-o allow_other: {FUSE_CONF} does not let users do that; run: {run}")


def _others_allowed(conf: Path = FUSE_CONF) -> bool:
    try:
        return re.search(r"^\s*user_allow_other\s*$", conf.read_text(), re.MULTILINE) is not None
    except OSError:
        return False


def check_folders(settings: Settings) -> None:
    """MountError, with what to run, unless every folder of the volume is this user's to write in, or to make."""
    wanted = [settings.volume.mountpoint, settings.volume.state_dir, settings.remote.directory]
    lacking = [path for path in wanted if path is not None and not _can_have(path)]
    for path in lacking:
        if _is_used(path):
            owner = _owner_name(path)  # not to be given away: it may hold that user's volume
            raise MountError(f"{path}: it is {owner}'s; run as {owner}, or name a folder of your own in mount.conf")
    if lacking:
        names = ", ".join(map(str, lacking))
        run = sudo("install", "-d", "-o", _name_of(os.geteuid()), "-g", _group_name(), *map(str, lacking))
        raise MountError(f"{names}: this user cannot make or write there; run: {run}")


def _can_have(path: Path) -> bool:
    """Whether the folder is there and writable, or can be made. What does not answer is there."""
    try:
        path.lstat()
    except FileNotFoundError:
        return _can_have(path.parent) if path.parent != path else False
    except PermissionError:
        return False
    except OSError:
        return True  # a dead mount: cleared later
    return os.access(path, os.R_OK | os.W_OK | os.X_OK) or _is_dead(path)


def _is_dead(path: Path) -> bool:
    """A mount whose daemon is gone: the kernel remembers its attributes for a while, and denies access."""
    try:
        os.statvfs(path)
    except OSError as e:
        return e.errno in NO_DAEMON
    return False


def _is_used(path: Path) -> bool:
    """Whether something is in the folder, as far as this user can see."""
    try:
        with os.scandir(path) as entries:
            return next(entries, None) is not None
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _owner_name(path: Path) -> str:
    try:
        return _name_of(path.stat().st_uid)
    except OSError:
        return "root"


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group_name() -> str:
    try:
        return grp.getgrgid(os.getegid()).gr_name
    except KeyError:
        return str(os.getegid())
