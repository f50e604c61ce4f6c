"""Every file of a volume's logs damaged in every way, on either side, through the mount."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.mount.world import World, world

CONF = '[tenants.default]\nkind = "files"\n[tenants.other]\nkind = "files"\n'
KINDS = ("flip", "truncate", "remove")
FILES = 12


class Case(NamedTuple):
    side: str
    name: str
    how: str
    rebuild: bool


def make(root: Path) -> None:
    """Several mounts' worth of log, with snapshots; unmounted, all of it in the remote."""
    with world(root, conf=CONF) as w:
        for n in range(FILES):
            if n % 4 == 0:
                w.mount()
            for tenant in ("default", "other"):
                (w.mnt / tenant / f"f{n}").write_bytes(content(tenant, n))
            w.ok("wait", w.mnt / "default", w.mnt / "other")
            if n % 4 == 3:
                w.umount()


def content(tenant: str, n: int) -> bytes:
    return f"{tenant} {n} ".encode() * 100


def cases(root: Path) -> Iterator[Case]:
    for side in ("state", "remote"):
        for folder in ("manifest", "audit"):
            for path in sorted((root / side / folder).rglob("*")):
                if path.is_file() and path.suffix in (".mlog", ".mlogs", ".bin", ".asl"):
                    for how in KINDS:
                        for rebuild in (False, True):
                            yield Case(side, str(path.relative_to(root / side)), how, rebuild)


def hurt(path: Path, how: str) -> None:
    os.chmod(path, 0o600)
    data = bytearray(path.read_bytes())
    if how == "remove":
        path.unlink()
    elif how == "truncate":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[len(data.rstrip(b"\0")) // 2] ^= 1  # not in the room that a chunk has left
        path.write_bytes(data)


def run_case(template: Path, root: Path, case: Case) -> None:
    """The mount comes up, the rest works, repair makes it whole, verify is clean."""
    only_here = case.side == "state" and case.name.endswith(".mlog") and not (template / "remote" / case.name).exists()
    shutil.copytree(template, root, ignore=shutil.ignore_patterns("mnt", "*.sock"))
    with world(root, conf=CONF) as w:
        hurt(root / case.side / case.name, case.how)
        if case.rebuild:
            shutil.rmtree(w.state / "catalog")
        w.mount()
        check(w, may_be_read_only=only_here and case.rebuild)
        if w.run("umount").code:
            w.run("umount", "--no-wait")
        done = w.run("verify", "--remote", "--repair")
        assert done.code in (0, 1), done.out + done.err
        w.verify("--remote")
        w.mount()
        check(w, may_be_read_only=False)
        w.umount()


def check(w: World, *, may_be_read_only: bool) -> None:
    for tenant in ("default", "other"):
        for n in range(FILES):
            assert (w.mnt / tenant / f"f{n}").read_bytes() == content(tenant, n)
        try:
            (w.mnt / tenant / "new").write_bytes(b"new")
        except OSError:
            assert may_be_read_only, f"{tenant} takes no writes"


def run_all(root: Path, say: Callable[[str], object], *, every: int = 1) -> tuple[int, list[str]]:
    """How many cases, and those that went wrong."""
    make(root / "template")
    wrong, count = [], 0
    for number, case in enumerate(cases(root / "template")):
        if number % every:
            continue
        count += 1
        try:
            run_case(root / "template", root / str(number), case)
        except AssertionError as e:
            wrong.append(f"{case}: {e}")
            say(wrong[-1][:2000])
        shutil.rmtree(root / str(number), ignore_errors=True)
    return count, wrong
