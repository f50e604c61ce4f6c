"""Each file of the logs damaged in turn, here and there: the volume opens, the rest works, repair makes it whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from aof2.engine.catalog import tables as t
from aof2.engine.errors import ReadOnlyError
from aof2.engine.settings import Settings
from aof2.engine.settings.model import FilesTenant
from aof2.engine.verify.run import verify
from aof2.engine.volume import Volume
from tests.engine.helpers import put_object, read_object, run_volume, small_settings
from tests.replicate.helpers import Replicated, run_replicated
from tests.support import LONG
from tests.verify.build import damage_of

TENANTS = {"default": "files", "other": "files"}
KINDS = ("flip", "truncate", "remove")


def content(tenant: str, n: int) -> bytes:
    return f"{tenant} {n} ".encode() * 50


def settings_of(root: Path) -> Settings:
    return msgspec.structs.replace(small_settings(root), tenants={name: FilesTenant() for name in TENANTS})


def make(root: Path) -> None:
    """Two tenants; of the first the log has snapshots, a bundle on the remote and chunks after them."""
    settings = settings_of(root)

    async def body(r: Replicated) -> None:
        for n in range(12):
            for tenant in TENANTS:
                await put_object(r.volume, tenant, b"f%d" % n, content(tenant, n))
            await r.settle()
            if n in (6, 9):
                for tenant in TENANTS:
                    await r.volume.checkpoint(tenant)
                for stream_id in list(r.volume.target.streams):
                    await r.snapshot(stream_id)
        await r.settle()

    run_replicated(settings, body)

    async def nothing(v: Volume) -> None:
        for tenant in TENANTS:
            await v.checkpoint(tenant)

    run_volume(settings, nothing)


class Case(NamedTuple):
    side: str
    name: str
    how: str

    def __str__(self) -> str:
        return f"{self.side}:{self.name}:{self.how}"


def files_of(root: Path) -> list[tuple[str, str]]:
    """Chunks, bundles, snapshots and audit logs, on both sides."""
    found = []
    for side, below in (("state", ("manifest", "audit")), ("remote", ("manifest", "audit"))):
        for folder in below:
            for path in sorted((root / side / folder).rglob("*")):
                if (
                    path.is_file()
                    and path.parent.name != "2"
                    and path.stem != "2"
                    and path.suffix in (".mlog", ".mlogs", ".bin", ".asl")
                ):
                    found.append((side, str(path.relative_to(root / side))))
    return found


def hurt(path: Path, how: str) -> None:
    os.chmod(path, 0o600)
    if how == "remove":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    if how == "truncate":
        path.write_bytes(data[: len(data) // 2])
    else:
        data[len(data.rstrip(b"\0")) // 2] ^= 1  # not in the room that a chunk has left
        path.write_bytes(data)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template")
    make(root)
    assert verify(settings_of(root), deep_remote=True).exit_code == 0
    return root


def is_active(root: Path, case: Case) -> bool:
    """The chunk that was being written: it has no other copy, but for the rows."""
    return case.side == "state" and case.name.endswith(".mlog") and not (root / "remote" / case.name).exists()


def read_and_write(settings: Settings, *, lost: int | None = None) -> None:
    """Everything reads back; every tenant takes a file, but the one whose log `lost` its end."""

    async def body(v: Volume) -> None:
        assert list(v.target.read_only_streams) == ([] if lost is None else [lost])
        for tenant_id, tenant in v.tenant_names().items():
            with v.catalog.view() as view:
                inodes = {name: e.ino for (_, name), e in view.scan(tenant_id, t.DENTRIES)}
            for n in range(12):
                data = content(tenant, n)
                assert await read_object(v, (tenant_id, inodes[b"f%d" % n], 1), 0, len(data) + 1) == data
            if tenant_id == lost:
                with pytest.raises(ReadOnlyError):
                    await put_object(v, tenant, b"refused", b"")
                continue
            await put_object(v, tenant, b"new", b"new in " + tenant.encode())
            await v.checkpoint(tenant)

    run_volume(settings, body)


@pytest.mark.expects_warnings
@pytest.mark.parametrize("rebuild", [False, True], ids=["rows", "rebuilt"])
def test_every_file_in_turn(template: Path, tmp_path: Path, rebuild: bool) -> None:
    """Kinds of damage take turns here, and with rows and without the files; `scripts/torture damage` does all of them,
    through the mount."""
    wrong = []
    for number, (side, name) in enumerate(files_of(template)):
        if not LONG and number % 2 != rebuild:
            continue
        how = KINDS[number // 2 % 3]
        root = tmp_path / str(number)
        shutil.copytree(template, root)
        try:
            one(root, Case(side, name, how), rebuild=rebuild)
        except AssertionError as e:
            wrong.append(f"{Case(side, name, how)}: {e}")
        except Exception as e:
            wrong.append(f"{Case(side, name, how)}: {e!r}")
        shutil.rmtree(root)
    assert not wrong, "\n".join(wrong)


def one(root: Path, case: Case, *, rebuild: bool) -> None:
    settings = settings_of(root)
    hurt(root / case.side / case.name, case.how)
    if rebuild:
        shutil.rmtree(root / "state" / "catalog")
    stream_id = int(Path(case.name).parts[1]) if case.name.startswith("manifest") else 0
    lost = stream_id if rebuild and is_active(root, case) and case.how != "truncate" else None
    read_and_write(settings, lost=lost)
    if lost is not None:
        said = [f.message for f in verify(settings).findings]
        assert any("cannot be replayed" in message for message in said), said
    found = verify(settings, deep_remote=True, repair=True)
    assert found.exit_code in (0, 1), [(f.message, f.repaired) for f in damage_of(found)]
    again = verify(settings, deep_remote=True)
    assert again.exit_code == 0, [f.message for f in damage_of(again)]

    async def body(v: Volume) -> None:
        assert not v.target.read_only_streams
        assert not v.replicator.stuck
        assert not v.replicator.audit_problems
        await put_object(v, "default", b"last", b"last")

    run_volume(settings, body)
