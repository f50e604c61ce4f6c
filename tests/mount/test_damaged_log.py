"""A damaged log is one tenant's trouble: through the mount."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.mount.world import World, kill, world

CONF = '[tenants.default]\nkind = "files"\n[tenants.other]\nkind = "files"\n'
STREAM = "1"  # of the tenant that comes first


def filled(w: World) -> None:
    """Two mounts' worth of files in both tenants, all of it in the remote; unmounted."""
    for mount in range(2):
        w.mount()
        for tenant in ("default", "other"):
            for n in range(3):
                (w.mnt / tenant / f"m{mount}f{n}").write_bytes(b"%d" % n * 100)
        w.umount()


def flip(path: Path) -> None:
    os.chmod(path, 0o600)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def sealed(w: World) -> list[Path]:
    """The chunks that are on both sides, oldest first."""
    here = (w.state / "manifest" / STREAM).glob("*.mlog")
    there = w.root / "remote" / "manifest" / STREAM
    return sorted((p for p in here if (there / p.name).exists()), key=lambda p: int(p.stem))


def test_a_chunk_that_the_remote_has_is_fetched(tmp_path: Path) -> None:
    with world(tmp_path, conf=CONF) as w:
        filled(w)
        for path in sealed(w):
            flip(path)
        shutil.rmtree(w.state / "catalog")
        w.mount()
        assert sorted(os.listdir(w.files)) == [f"m{m}f{n}" for m in range(2) for n in range(3)]
        (w.files / "new").write_bytes(b"new")
        assert json.loads(w.ok("status", "--json"))["mount"]["mended_log_files"] > 0
        assert any("mended from the remote" in line for line in w.complaints())
        assert list((w.state / "quarantine" / STREAM).iterdir())
        w.umount()
        w.verify("--remote")


def test_a_chunk_that_no_copy_has_makes_its_tenant_read_only(tmp_path: Path) -> None:
    with world(tmp_path, conf=CONF) as w:
        filled(w)
        before = {path.name for path in sealed_here(w)}
        w.mount()
        for n in range(3):
            (w.files / f"late{n}").write_bytes(b"late")
            w.ok("wait", w.files)
        kill(w.daemon_pid())  # no snapshot covers these
        victim = next(path for path in sealed_here(w)[1:] if path.name not in before)
        flip(victim)
        for path in (w.root / "remote" / "manifest" / STREAM).rglob(victim.name):
            path.unlink()
        shutil.rmtree(w.state / "catalog")
        w.mount()
        other = w.mnt / "other"
        assert len(os.listdir(other)) == 6
        (other / "new").write_bytes(b"new")
        w.ok("wait", other / "new")
        for change in (
            lambda: (w.files / "new").write_bytes(b"x"),
            lambda: os.mkdir(w.files / "dir"),
            lambda: os.unlink(w.files / "m0f0"),
        ):
            with pytest.raises(OSError) as e:
                change()
            assert e.value.errno == errno.EROFS, e.value
        assert (w.files / "m0f0").read_bytes() == b"0" * 100
        said = w.ok("status")
        assert "default is read-only" in said
        assert "cannot be replayed" in said
        w.run("umount")
        w.run("umount", "--no-wait")
        found = w.run("verify")
        assert found.code == 4
        assert "cannot be replayed" in found.err + found.out
        mended = w.run("verify", "--repair")
        assert mended.code in (1, 4), mended.err
        w.mount()
        (w.files / "new").write_bytes(b"again")
        (w.mnt / "other" / "more").write_bytes(b"more")
        w.ok("wait", w.mnt / "other")
        w.umount()


def sealed_here(w: World) -> list[Path]:
    """Chunks of the first tenant that are complete: all but the last."""
    return sorted((w.state / "manifest" / STREAM).glob("*.mlog"), key=lambda p: int(p.stem))[:-1]
