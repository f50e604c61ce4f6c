"""Runs a command as a user without any privilege, in a world where such a user may mount: root's tests use it.

    python tests/support/plain_user.py COMMAND …        (by root; in a mount namespace of its own, see `command`)

In the namespace /dev/fuse is open to everybody, as distributions have it, the folders above the interpreter and the
project can be passed, however root keeps its home, and no volume is mounted. The machine itself is left as it is.

Owner: the process that is started with it; the namespace ends with its last process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

USER = "nobody"  # it has a line in passwd everywhere; fusermount3 wants to know a name
UID = 65534
DEVICE = Path("/dev/fuse")
PROJECT = Path(__file__).resolve().parents[2]
_OTHERS_PASS = 0o001


def why_not() -> str:
    """Why a user without privileges cannot be tried here; "" when it can."""
    if os.geteuid() != 0:
        return "these tests run as a plain user already"
    for name in ("unshare", "setpriv", "fusermount3", "mount"):
        if shutil.which(name) is None:
            return f"there is no {name}"
    if not DEVICE.exists():
        return "there is no /dev/fuse"
    tried = subprocess.run([*command("true")], capture_output=True, text=True, timeout=60, check=False)
    return f"no such world can be made: {tried.stderr.strip()}" if tried.returncode else ""


def command(*args: object) -> list[str]:
    """The command line that runs `args` as that user."""
    return ["unshare", "--mount", "--propagation=private", "--", sys.executable, "-I", __file__, *map(str, args)]


def environment(home: Path) -> dict[str, str]:
    """The environment of such a user: nothing of root's but where programs are."""
    keep = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "LC_ALL", "TZ")}
    return keep | {"HOME": str(home), "USER": USER, "LOGNAME": USER, "PYTHONDONTWRITEBYTECODE": "1"}


def give(path: Path) -> Path:
    """The folder, made, and the user's."""
    path.mkdir(parents=True, exist_ok=True)
    os.chown(path, UID, UID)
    return path


# -- in the namespace ----------------------------------------------------------------------------------------------


def _mount(*args: object) -> None:
    subprocess.run(["mount", *map(str, args)], check=True)


def _open_device(scratch: Path) -> None:
    node = scratch / "fuse"
    number = DEVICE.stat().st_rdev
    os.mknod(node, 0o020600, number)
    node.chmod(int(os.environ.get("AOF2_TEST_DEVICE_MODE", "666"), 8))
    _mount("--bind", node, DEVICE)
    node.unlink()


def _open_ways(needed: Iterable[Path], scratch: Path) -> None:
    """Every folder above these can be passed: one that cannot is covered, and what is needed shows through."""
    paths = [path.resolve() for path in needed]
    for above in sorted({above for path in paths for above in path.parents}, key=lambda path: len(path.parts)):
        if above.stat().st_mode & _OTHERS_PASS:
            continue
        shown = {above / path.relative_to(above).parts[0] for path in paths if above in path.parents}
        for number, below in enumerate(shown):
            (scratch / f"kept{number}").mkdir()
            _mount("--bind", below, scratch / f"kept{number}")
        _mount("-t", "tmpfs", "-o", "mode=755", "aof2-test", above)
        for number, below in enumerate(shown):
            below.mkdir()
            _mount("--move", scratch / f"kept{number}", below)
            (scratch / f"kept{number}").rmdir()


def _become_user() -> None:
    os.setgroups([])
    os.setresgid(UID, UID, UID)
    os.setresuid(UID, UID, UID)
    os.umask(0o022)


def _let_go_of_others() -> None:
    """Volumes that other tests have mounted: a copy in this namespace would keep them after their unmount."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("fuse.aof2 "):
            subprocess.run(["umount", "-l", before.split()[4]], capture_output=True, check=False)


def main(args: Sequence[str]) -> None:
    _let_go_of_others()
    with tempfile.TemporaryDirectory(prefix="aof2-plain-") as scratch:
        _open_device(Path(scratch))
        _open_ways((PROJECT, Path(sys.prefix), Path(sys.base_prefix)), Path(scratch))
    _become_user()
    os.chdir(os.environ.get("HOME", "/"))
    os.execvp(args[0], args)


if __name__ == "__main__":
    main(sys.argv[1:])
