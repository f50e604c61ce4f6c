"""Packs of small files through a real mount: bad ones in the remote, bad moments, and what is fetched beside a file."""

from __future__ import annotations

import random
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aof2.fs.bench.seaweed import REGION
from tests.mount.test_metrics_fed import fresh, metrics
from tests.mount.world import World, world
from tests.support.mount import MountedVolume, mounted_volume, until
from tests.support.seaweed import Fault, FaultProxy, of, running_seaweed

KIB = 1 << 10
TENANTS = {"default": {"kind": "files", "compression": "none"}, "other": {"kind": "files", "compression": "none"}}
COUNT = 24


def content(i: int, size: int = 4 * KIB) -> bytes:
    return random.Random(i).randbytes(size - i % 100)


def write(folder: Path, numbers: range, size: int = 4 * KIB) -> list[Path]:
    paths = [folder / f"f{i:04}" for i in numbers]
    for i, path in zip(numbers, paths, strict=True):
        path.write_bytes(content(i, size))
    return paths


def packed(v: MountedVolume, folder: Path, *, first: int = 0, count: int = COUNT) -> list[Path]:
    """Small files of which most are in one pack."""
    folder.mkdir(exist_ok=True)
    paths = write(folder, range(first, first + count))
    v.done("wait", folder)
    return paths


def packs(v: MountedVolume, tenant: str = "default") -> list[Path]:
    return sorted((v.remote / "checkpoints" / tenant).rglob("pack-*.blob"))


def status(v: MountedVolume, path: Path | None = None) -> dict[str, Any]:
    name = str(path.relative_to(v.mountpoint)) if path is not None else None
    answer: dict[str, Any] = v.ask("status", path=name)
    found: dict[str, Any] = answer["volume" if path is None else "object"]
    return found


def place(v: MountedVolume, path: Path) -> tuple[str, int, int]:
    (chunk,) = status(v, path)["chunks"]
    return chunk["key"], chunk["offset"], chunk["stored_bytes"]


def in_pack(v: MountedVolume, paths: list[Path], pack: Path) -> dict[Path, tuple[int, int]]:
    """Those of the files that lie in it: offset and length."""
    found = {path: place(v, path) for path in paths}
    return {path: (at, size) for path, (key, at, size) in found.items() if v.remote / key == pack}


def reads(path: Path) -> bytes | None:
    """None: an I/O error, never other bytes."""
    try:
        return fresh(path)
    except OSError as e:
        assert e.errno == 5, e
        return None


def harm(kind: str, v: MountedVolume, pack: Path, inside: dict[Path, tuple[int, int]]) -> set[Path]:
    """Which files are damaged by it."""
    raw = bytearray(pack.read_bytes())
    files = sorted(inside, key=lambda path: inside[path])
    (first, (a, a_len)), (last, (z, _)) = ((path, inside[path]) for path in (files[0], files[-1]))
    match kind:
        case "cut short":
            pack.write_bytes(raw[: z + 100])
            return {last}
        case "lying directory":
            raw[-200] ^= 1
            pack.write_bytes(raw)
            return set()  # no file is read by it
        case "swapped":
            second, (b, b_len) = files[1], inside[files[1]]
            pack.write_bytes(raw[:a] + raw[b : b + b_len] + raw[a : a + a_len] + raw[b + b_len :])
            return {first, second}
        case "of another tenant":
            packed(v, v.mountpoint / "other", first=100, count=2 * COUNT)
            shutil.copyfile(max(packs(v, "other"), key=lambda path: path.stat().st_size), pack)
            return set(inside)
        case "of another volume":
            with mounted_volume(v.root / "elsewhere", tenants=TENANTS) as elsewhere:
                packed(elsewhere, elsewhere.path, first=200, count=2 * COUNT)
                shutil.copyfile(max(packs(elsewhere), key=lambda path: path.stat().st_size), pack)
            return set(inside)
        case "gone":
            pack.unlink()
            return set(inside)
    raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind", ["cut short", "lying directory", "swapped", "of another tenant", "of another volume", "gone"]
)
def test_a_bad_pack_serves_nothing_wrong(tmp_path: Path, kind: str) -> None:
    """What is whole in it is read, the rest is an error, and is good again where this disk has it."""
    with mounted_volume(tmp_path / "v", tenants=TENANTS) as v:
        paths = packed(v, v.path)
        empty = v.path / "empty"
        empty.write_bytes(b"")
        pack = max(packs(v), key=lambda path: path.stat().st_size)
        inside = in_pack(v, paths, pack)
        assert len(inside) >= 4
        kept = min(inside, key=lambda path: inside[path])  # stays on this disk
        v.evict(*(path for path in paths if path != kept))
        damaged = harm(kind, v, pack, inside) - {kept}
        for i, path in enumerate(paths):
            assert reads(path) == (None if path in damaged else content(i)), path
        assert fresh(empty) == b""
        for path in damaged:
            assert status(v, path)["needs_repair"] and not status(v, path)["durable"]
        assert status(v)["needs_repair"] == len(damaged)
        job = v.aof2("jobs", "start", "verify", "default", "--wait")
        lost = len(damaged)
        assert (job.returncode, f"{lost} of" in job.stdout + job.stderr) == ((1, True) if lost else (0, False))
        if damaged or kind in ("swapped", "gone"):
            assert place(v, kept)[0].rpartition("/")[2].startswith("pack-") == (kind == "cut short")  # put again alone
        v.umount()
        found = v.aof2("verify", "--remote")
        assert (found.returncode != 0) == bool(damaged), found.stdout
        assert (found.stdout + found.stderr).count(pack.name) >= len(damaged)
        v.remount()
        v.evict(kept)
        assert fresh(kept) == content(paths.index(kept))


def test_empty_files_and_small_ones_are_written_again_while_they_are_on_their_way(tmp_path: Path) -> None:
    """The pack is held before the server: a member gets new bytes, another is removed, one is emptied."""
    with away(tmp_path) as (w, between):
        held = threading.Event()
        between.add(Fault(of("PUT", "/pack-"), times=None, hold=held))
        paths = write(w.files, range(COUNT))
        for i in range(4):
            (w.files / f"empty{i}").write_bytes(b"")
        until(lambda: between.count("PUT", "/pack-") > 0, "no pack is on its way")
        paths[0].write_bytes(b"new")
        paths[1].unlink()
        paths[2].write_bytes(b"")
        held.set()
        between.clear()
        w.ok("wait", w.files)
        w.ok("evict", w.files)
        expected = {path: content(i) for i, path in enumerate(paths)} | {paths[0]: b"new", paths[2]: b""}
        del expected[paths[1]]
        assert {path: fresh(path) for path in expected} == expected
        assert all((w.files / f"empty{i}").read_bytes() == b"" for i in range(4))
        w.umount()
        w.verify("--remote")


def test_the_server_goes_away_in_the_middle(tmp_path: Path) -> None:
    """Of an upload, which is done again; of a fetch of neighbours, whose readers get theirs in the end."""
    with away(tmp_path) as (w, between):
        between.add(Fault(of("PUT", "/pack-"), times=1, drop_after=True))  # it is there, and nobody is told
        between.add(Fault(of("PUT", "/pack-"), times=1, drop=True))
        between.add(Fault(of("PUT", "/pack-"), times=2, status=503, code="SlowDown"))
        paths = write(w.files, range(COUNT))
        w.ok("wait", w.files)
        w.ok("evict", w.files)
        between.add(Fault(of("GET", "/pack-"), times=1, cut_at=1000))
        between.add(Fault(of("GET", "/pack-"), times=1, flip_at=40))
        for i, path in enumerate(paths):
            assert fresh(path) == content(i)
        w.ok("evict", w.files)
        between.down()
        (w.files / "late").write_bytes(b"late")
        assert all(reads(path) in (None, content(i)) for i, path in enumerate(paths))  # some came with their neighbours
        between.up()
        until(
            lambda: [reads(path) for path in paths] == [content(i) for i in range(COUNT)], "it does not come back", 60
        )
        w.ok("wait", w.files)
        w.umount()
        w.verify("--remote")


@contextmanager
def away(tmp_path: Path) -> Iterator[tuple[World, FaultProxy]]:
    """A mount on a real S3 server with a proxy in between."""
    with running_seaweed(tmp_path / "weed") as server:
        between = FaultProxy(server.port)
        remote = (
            f'[remote]\nurl = "s3://{server.bucket}/packs"\nendpoint_url = "{between.endpoint_url}"\n'
            f'region = "{REGION}"\ntimeout = "5s"\n'
        )
        conf = '[cache]\nwarm_bytes = "0"\nmin_free = "1MiB"\n[tenants.default]\nkind = "files"\ncompression = "none"\n'
        try:
            with world(tmp_path / "w", remote=remote, conf=conf, environ=server.environ()) as w:
                w.mount()
                yield w, between
        finally:
            between.clear()
            between.down()


# -- rewriting -----------------------------------------------------------------------------------------------------


def test_sparse_packs_are_written_anew_and_told(tmp_path: Path) -> None:
    retention = {"undelete_window": "0s", "purge_after": "1s", "checkpoints": 1}
    with mounted_volume(tmp_path, tenants=TENANTS, retention=retention) as v:
        paths = packed(v, v.path, count=200)
        old = packs(v)
        v.evict(v.path)
        assert reads(paths[3]) == content(3)
        told = v.json("status")
        assert told["pack_amplification"] == told["tenants"][0]["pack_amplification"] == 1.0
        for i, path in enumerate(paths):
            if i % 5:
                path.unlink()
        until(lambda: status(v)["pack_amplification"] > 2 or packs(v) != old, "the dead count as live", 60)
        assert re.search(r"packs\t.* in use, amplification \d+\.\d\d", v.done("status"))

        def collected() -> bool:
            v.done("gc", "default")
            return not set(old) & set(packs(v))

        until(collected, "the old packs stay", 60)
        now = metrics(v.mountpoint)
        assert 1.0 <= now["aof2_pack_amplification"] < 2
        assert now["aof2_pack_bytes"] == sum(path.stat().st_size for path in packs(v))
        assert "RewritePacks" in v.done("jobs")
        v.evict(v.path)
        assert [reads(paths[i]) for i in range(0, 200, 5)] == [content(i) for i in range(0, 200, 5)]
        v.umount()
        assert v.aof2("verify", "--remote").returncode == 0
        assert not v.complaints()
