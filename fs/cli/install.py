"""`aof2 install-helpers`: what mount(8), fsck(8) and systemd look for, from the templates in `fs/helpers/`."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import click

from aof2.fs.cli import output
from aof2.fs.cli.errors import CliError
from aof2.fs.privileges import sudo


class Helper(NamedTuple):
    """A file to install: its template, or what it links to."""

    path: str
    template: str = ""
    link: str = ""
    mode: int = 0o755


# What mount(8) and systemd search, whatever the user's PATH says; where aof2 is in none of these, it gets a name there.
SYSTEM_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
COMMAND = "usr/local/bin/aof2"
HELPERS = (
    Helper("sbin/mount.aof2", "mount.aof2"),
    Helper("sbin/mount.fuse.aof2", link="mount.aof2"),
    Helper("sbin/fsck.aof2", "fsck.aof2"),
    Helper("sbin/fsck.fuse.aof2", link="fsck.aof2"),
    Helper("etc/systemd/system/aof2.service", "aof2.service", mode=0o644),
)


@click.command(epilog="Example: aof2 install-helpers --dry-run")
@click.option("--root", metavar="DIR", default="/", help="Install below DIR, for a package or an image. Default: /")
@click.option("--dry-run", is_flag=True, help="Say what would be written, write nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def install_helpers(root: str, dry_run: bool, as_json: bool) -> None:
    """Let mount(8), fsck(8) and systemd find AOF2.

    Writes /sbin/mount.aof2 (mount -t aof2, and fuse.aof2 in fstab), /sbin/fsck.aof2 and the unit aof2.service, which
    call this very program, and links it into /usr/local/bin where no system folder has it. Again changes nothing.
    """
    program = find_program()
    done = []
    helpers = HELPERS if str(Path(program).parent) in SYSTEM_PATH else (Helper(COMMAND, link=program), *HELPERS)
    for helper in helpers:
        path = Path(root) / helper.path
        try:
            what = _install(helper, path, program, dry_run=dry_run)
        except PermissionError:
            again = sudo(program, "install-helpers", *(["--root", root] if root != "/" else []))
            raise CliError(f"{path}: only root may write there; run: {again}") from None
        done.append({"path": str(path), "what": what})
    if as_json:
        output.print_json({"program": program, "files": done, "dry_run": dry_run})
        return
    for one in done:
        output.print_line(f"{one['what']} {one['path']}")
    if not dry_run:
        output.print_line("fstab: aof2 /aof2 fuse.aof2 conf=/etc/aof2/mount.conf,_netdev 0 0")


def find_program() -> str:
    """The `aof2` that runs now, as an absolute path that a shell and systemd take."""
    name = sys.argv[0]
    found = shutil.which(name) if os.sep not in name else name
    if not found or Path(found).name != "aof2":
        found = str(Path(sys.prefix) / "bin" / "aof2")
    path = os.path.abspath(found)  # noqa: PTH100 (the name it has, not what it links to)
    if not os.access(path, os.X_OK):
        raise CliError(f"{path}: this is not an installed aof2; install it with pip, then run it")
    if any(c in path for c in "'\"\\ \n%$"):
        raise CliError(f"{path}: a path with such characters cannot be put into a unit; install aof2 elsewhere")
    return path


def _install(helper: Helper, path: Path, program: str, *, dry_run: bool) -> str:
    if helper.link:
        if path.is_symlink() and os.readlink(path) == helper.link:  # noqa: PTH115
            return "kept"
        if path.exists() and not path.is_symlink():
            return "left alone, a file of its own:"
        if not dry_run:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.symlink_to(helper.link)
        return "would link" if dry_run else "linked"
    text = (files("aof2.fs") / "helpers" / helper.template).read_text().replace("@AOF2@", program)
    if path.is_file() and path.read_text(errors="replace") == text and stat.S_IMODE(path.stat().st_mode) == helper.mode:
        return "kept"
    if not dry_run:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(text)
        temporary.chmod(helper.mode)
        temporary.replace(path)
    return "would write" if dry_run else "wrote"
