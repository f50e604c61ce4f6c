"""Every metric that is shown moves when its event happens, through a real mount.

`TABLE` has a row for each metric: the step of a volume's life in which it must move, or the test with a mount of its
own for it. A metric without a row fails the first test, so nothing can be shown that is not fed. A step acts; then
everything that is said to move in it must get another value than before.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.batch import PART_HEADER
from aof2.engine.manifest.reader import Record, Stream
from aof2.engine.settings.loader import load_settings
from aof2.fs.bench.seaweed import REGION
from tests.mount.following import pair
from tests.mount.test_machines import machine, restore
from tests.mount.world import World, world
from tests.support.mount import MountedVolume, conf_text, mounted_volume, until
from tests.support.seaweed import Fault, FaultProxy, of, running_seaweed
from tests.verify.build import commit

MIB = 1 << 20
PATIENCE_S = 60.0
TENANTS = {"default": {"kind": "files", "compression": "zstd"}}
CACHE = {"hot_bytes": "64MiB", "warm_bytes": "64MiB", "page_cache_bytes": "16MiB"}
Step = Callable[[MountedVolume], contextlib.AbstractContextManager[None]]


def metrics(mountpoint: Path) -> dict[str, float]:
    """Series → value; of histograms the count, NaN as 0."""
    text = (mountpoint / ".aof2" / "metrics").read_text()
    found = {name: float(value) for name, value in re.findall(r"^([a-z][^ ]*) (\S+)$", text, re.MULTILINE)}
    found = {name: 0.0 if math.isnan(value) else value for name, value in found.items()}
    return {n: v for n, v in found.items() if "_bucket{" not in n and not n.endswith("_sum") and "_sum{" not in n}


def family(series: str, names: set[str]) -> str:
    name = series.partition("{")[0]
    return name if name in names else name.removesuffix("_count")


def families(mountpoint: Path) -> set[str]:
    text = (mountpoint / ".aof2" / "metrics").read_text()
    return {n for n in re.findall(r"^# TYPE (\S+)", text, re.MULTILINE) if not n.startswith("process_")}


def half_random(seed: int, size: int) -> bytes:
    """Compresses to about half."""
    rng = random.Random(seed)
    return b"".join(rng.randbytes(512) + bytes(512) for _ in range(size // 1024))


def fresh(path: Path) -> bytes:
    """Read past the kernel's pages."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        out = bytearray()
        while piece := os.read(fd, 128 * 1024):
            out += piece
        return bytes(out)
    finally:
        os.close(fd)


# -- the steps -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def written(v: MountedVolume) -> Iterator[None]:
    """A file is written and reaches the remote, staged on the way."""
    (v.path / "first").write_bytes(half_random(1, 9 * MIB))
    v.done("wait", v.path / "first")
    yield


@contextlib.contextmanager
def fetched(v: MountedVolume) -> Iterator[None]:
    """A cold file is read from its start to its end."""
    v.evict(v.path / "first")
    assert fresh(v.path / "first") == half_random(1, 9 * MIB)
    yield


@contextlib.contextmanager
def scanned(v: MountedVolume) -> Iterator[None]:
    v.evict(v.path / "first")
    os.setxattr(v.path / "first", "user.aof2.cold_scan", b"1")
    assert fresh(v.path / "first") == half_random(1, 9 * MIB)
    os.removexattr(v.path / "first", "user.aof2.cold_scan")
    yield


@contextlib.contextmanager
def crowded_out(v: MountedVolume) -> Iterator[None]:
    """More files than hot_cache holds: the first become warm. Given up there, too, they are wanted again at once."""
    paths = [v.path / f"crowd{n}" for n in range(9)]
    for n, path in enumerate(paths):
        path.write_bytes(half_random(n + 10, 8 * MIB))
        v.done("wait", path)
    assert fresh(paths[0]) == half_random(10, 8 * MIB)  # warm is local, too
    yield


@contextlib.contextmanager
def wanted_again(v: MountedVolume) -> Iterator[None]:
    """What does not compress leaves hot_cache for the remote alone, and is read a moment later."""
    paths = [v.path / f"noise{n}" for n in range(9)]
    for n, path in enumerate(paths):
        path.write_bytes(random.Random(n).randbytes(8 * MIB))
        v.done("wait", path)
    for n, path in enumerate(paths):
        assert fresh(path) == random.Random(n).randbytes(8 * MIB)
    yield
    v.evict(*paths)


@contextlib.contextmanager
def given_up(v: MountedVolume) -> Iterator[None]:
    """`aof2 evict` of files that are warm."""
    v.evict(*(v.path / f"crowd{n}" for n in range(9)))
    yield


@contextlib.contextmanager
def without_room(v: MountedVolume) -> Iterator[None]:
    """Everything hot_cache holds is in use: a cold file is served from memory, also the second time."""
    cold = v.path / "cold"
    cold.write_bytes(half_random(50, 20 * MIB))
    v.done("wait", cold)
    v.evict(cold)
    used = [v.path / f"used{n}" for n in range(8)]
    with contextlib.ExitStack() as stack:
        for n, path in enumerate(used):
            path.write_bytes(half_random(60 + n, 8 * MIB - 64 * 1024))
            v.done("wait", path)
            stack.enter_context(path.open("rb"))
        v.done("warm", *used)  # one that was durable and not open yet may have made way for the next
        for _ in range(2):
            assert fresh(cold) == half_random(50, 20 * MIB)
        fd = stack.enter_context(cold.open("rb")).fileno()
        for _ in range(2):  # what PageCache has: the same megabyte again
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            assert os.pread(fd, 256 * 1024, 0) == half_random(50, 20 * MIB)[: 256 * 1024]
        yield
    for path in used:
        path.unlink()


@contextlib.contextmanager
def remote_away(v: MountedVolume) -> Iterator[None]:
    """The remote's folder is gone for a while; one file is written, another is wanted that is only there."""
    v.evict(v.path / "first")
    v.remote.rename(v.remote.with_name("away"))
    try:
        (v.path / "late").write_bytes(half_random(2, 9 * MIB))
        with pytest.raises(OSError, match="Input/output error"):
            fresh(v.path / "first")
        yield
    finally:
        v.remote.with_name("away").rename(v.remote)
    v.done("wait", v.path / "late")


@contextlib.contextmanager
def unreadable(v: MountedVolume) -> Iterator[None]:
    """A folder that a scrape looks into is not there for a moment."""
    folder = v.state_dir / "manifest" / "1"
    folder.rename(folder.with_name("gone"))
    try:
        metrics(v.mountpoint)
    finally:
        folder.with_name("gone").rename(folder)
    yield


@contextlib.contextmanager
def time_passes(v: MountedVolume) -> Iterator[None]:
    yield


@contextlib.contextmanager
def mounted_again(v: MountedVolume) -> Iterator[None]:
    """With a larger cache, and a shadow of the log that was tampered with."""
    v.umount()
    shadow = v.state_dir / "manifest" / "1" / "shadow.json"
    state = json.loads(shadow.read_text())
    next(iter(state["segments"].values()))["durable_bytes"] += 1
    shadow.write_text(json.dumps(state))
    v.conf.write_text(conf_text(v.root, TENANTS, {"cache": {**CACHE, "hot_bytes": "96MiB"}, "manifest": SHADOW}))
    v.remount()
    yield


SHADOW = {"shadow": True}
STEPS: tuple[Step, ...] = (
    written,
    fetched,
    scanned,
    crowded_out,
    given_up,
    wanted_again,
    without_room,
    remote_away,
    unreadable,
    time_passes,
    mounted_again,
)
TABLE: dict[str, Step | str] = {
    # the checkpoint design's
    "checkpoint_duration_seconds_count": written,
    "checkpoint_bytes_written_local": written,
    "checkpoint_bytes_written_remote": written,
    "checkpoint_queue_depth": remote_away,
    "storage_quota_exhausted_total": without_room,
    'page_fetch_latency_seconds_count{tier="PageCache"}': without_room,
    'page_fetch_latency_seconds_count{tier="Local"}': crowded_out,
    'page_fetch_latency_seconds_count{tier="Remote"}': fetched,
    'page_fetch_latency_seconds_count{tier="ColdScan"}': scanned,
    'remote_bytes_read_total{mode="normal"}': fetched,
    'remote_bytes_read_total{mode="cold_scan"}': scanned,
    # the manifest log's
    "manifest_chunks_active": written,
    "manifest_replay_seconds": mounted_again,
    "manifest_crc_error_count": "test_damage_in_the_log_is_counted",
    "manifest_upload_retries_total": remote_away,
    "manifest_snapshot_age_seconds": time_passes,
    "manifest_shadow_divergence": mounted_again,
    # ours
    'aof2_tier_bytes{tier="hot"}': written,
    'aof2_tier_bytes{tier="warm"}': crowded_out,
    'aof2_tier_bytes{tier="page_cache"}': without_room,
    'aof2_tier_limit_bytes{tier="hot"}': mounted_again,
    'aof2_tenant_bytes{tenant="default",tier="hot"}': written,
    'aof2_tenant_bytes{tenant="default",tier="warm"}': crowded_out,
    "aof2_dirty_bytes": remote_away,
    "aof2_page_cache_hits_total": without_room,
    "aof2_page_cache_misses_total": without_room,
    'aof2_evictions_total{tier="hot"}': crowded_out,
    'aof2_evictions_total{tier="warm"}': given_up,
    'aof2_evictions_total{tier="page_cache"}': without_room,
    'aof2_evicted_bytes_total{tier="hot"}': crowded_out,
    'aof2_evicted_bytes_total{tier="warm"}': given_up,
    'aof2_evicted_bytes_total{tier="page_cache"}': without_room,
    'aof2_hydrations_total{result="ok"}': fetched,
    'aof2_hydrations_total{result="error"}': remote_away,
    "aof2_hydrated_bytes_total": fetched,
    "aof2_thrash_total": wanted_again,
    "aof2_pack_bytes": "test_neighbours_that_are_not_read_are_counted",
    "aof2_pack_live_bytes": "test_neighbours_that_are_not_read_are_counted",
    "aof2_pack_amplification": "test_neighbours_that_are_not_read_are_counted",
    "aof2_pack_neighbours_bytes_total": "test_neighbours_that_are_not_read_are_counted",
    "aof2_pack_neighbours_unread_bytes_total": "test_neighbours_that_are_not_read_are_counted",
    "aof2_pack_window_bytes": "test_neighbours_that_are_not_read_are_counted",
    'aof2_remote_requests_total{op="put",result="ok"}': written,
    'aof2_remote_requests_total{op="get",result="ok"}': fetched,
    'aof2_remote_requests_total{op="put",result="error"}': remote_away,
    'aof2_remote_retries_total{op="put"}': "test_bad_weather_is_counted",
    'aof2_remote_request_seconds_count{op="put"}': written,
    "aof2_remote_bytes_written_total": written,
    'aof2_remote_breaker_state{state="closed"}': remote_away,
    'aof2_remote_breaker_state{state="open"}': remote_away,
    "aof2_remote_refused_total": "test_bad_weather_is_counted",
    'aof2_log_lag_records{stream="1"}': remote_away,
    'aof2_log_lag_bytes{stream="1"}': remote_away,
    'aof2_log_lag_seconds{stream="1"}': remote_away,
    'aof2_log_stands{stream="1"}': remote_away,
    "aof2_follow_lag_seconds": "test_a_follower_says_how_far_it_is",
    "aof2_follow_away": "test_a_follower_says_how_far_it_is",
    "aof2_followers": "test_a_follower_says_how_far_it_is",
    "aof2_quota_used_bytes": written,
    "aof2_quota_reserved_bytes": "test_bad_weather_is_counted",
    "aof2_quota_limit_bytes": mounted_again,
    "aof2_disk_free_bytes": written,
    'aof2_jobs{state="done"}': written,
    "aof2_read_only": "test_read_only_mounts_say_so",
    "aof2_scrape_errors_total": unreadable,
    "aof2_fenced": "test_a_writer_that_lost_the_volume_says_so",
    "aof2_log_files_mended": "test_damage_in_the_log_is_counted",
    "aof2_log_events_unknown": "test_damage_in_the_log_is_counted",
}


def wait_until_moved(v: MountedVolume, step: Step, before: dict[str, float], seen: set[str]) -> None:
    wanted = {series for series, where in TABLE.items() if where is step}
    moved: set[str] = set()
    deadline_s = time.monotonic() + PATIENCE_S
    while left := wanted - moved:
        assert time.monotonic() < deadline_s, f"{step.__name__}: {sorted(left)} did not move"
        now = metrics(v.mountpoint)
        seen |= families(v.mountpoint)
        moved |= {series for series in left if now.get(series, 0.0) != before.get(series, 0.0)}
        time.sleep(0.05)


def test_every_metric_moves_with_its_event(tmp_path: Path) -> None:
    seen: set[str] = set()
    sections = {"cache": CACHE, "manifest": SHADOW, "remote": {"timeout": "2s", "retries": 2}}
    with mounted_volume(tmp_path, options=["nopassthrough"], tenants=TENANTS, timeout_s=300, **sections) as v:
        for step in STEPS:
            before = metrics(v.mountpoint)
            with step(v):
                wait_until_moved(v, step, before, seen)
    rows = {family(series, seen) for series in TABLE}
    assert seen - rows == set(), "shown, and no row says what feeds it"
    assert rows - seen == set(), "no such metric"
    elsewhere = {where for where in TABLE.values() if isinstance(where, str)}
    assert elsewhere <= globals().keys(), "a row names a test that is not here"


def test_read_only_mounts_say_so(tmp_path: Path) -> None:
    def shown(root: Path) -> float:
        return metrics(root)["aof2_read_only"]

    with mounted_volume(tmp_path, tenants=TENANTS) as v:
        assert shown(v.mountpoint) == 0
        v.umount()
        v.options = ["ro"]
        v.remount()
        assert shown(v.mountpoint) == 1
        v.umount()
        v.options = []
        v.conf.write_text(conf_text(v.root, TENANTS, {"manifest": {"enabled": False}}))
        v.remount()
        assert shown(v.mountpoint) == 1


def test_bad_weather_is_counted(tmp_path: Path) -> None:
    """On a real S3 server behind a proxy: it is slow, then not available, then refuses us."""
    with running_seaweed(tmp_path / "weed") as server:
        between = FaultProxy(server.port)
        remote = (
            f'[remote]\nurl = "s3://{server.bucket}/weather"\nendpoint_url = "{between.endpoint_url}"\n'
            f'region = "{REGION}"\ntimeout = "10s"\n'
        )
        conf = '[cache]\nwarm_bytes = "0"\nmin_free = "1MiB"\n[tenants.default]\nkind = "files"\ncompression = "zstd"\n'
        try:
            with world(tmp_path / "w", remote=remote, conf=conf, environ=server.environ()) as w:
                w.mount()
                _weather(w, between)
        finally:
            between.clear()
            between.down()


def _weather(w: World, between: FaultProxy) -> None:
    before = metrics(w.mnt)

    def moves(*wanted: str) -> None:
        until(lambda: all(_moved(before, metrics(w.mnt), one) for one in wanted), f"{wanted} did not move", PATIENCE_S)

    held = threading.Event()
    between.add(Fault(of("PUT", "/chunk-"), times=None, hold=held))
    between.add(Fault(of("POST", "/chunk-"), times=None, hold=held))
    (w.files / "slow").write_bytes(half_random(1, 9 * MIB))
    try:
        moves("aof2_quota_reserved_bytes")  # staged, and on its way
    finally:
        held.set()
    between.clear()
    w.ok("wait", w.files / "slow")
    between.add(Fault(of("PUT", "/chunk-"), times=2, status=503, code="SlowDown"))
    (w.files / "put").write_bytes(half_random(2, MIB))
    w.ok("wait", w.files / "put")
    moves('aof2_remote_retries_total{op="put"}')
    w.ok("evict", w.files / "put")
    between.add(Fault(of("GET", "/chunk-"), times=2, status=503, code="SlowDown"))
    assert fresh(w.files / "put") == half_random(2, MIB)
    moves('aof2_remote_retries_total{op="get"}')
    between.add(Fault(times=None, status=403, code="AccessDenied"))
    (w.files / "refused").write_bytes(b"x")
    moves("aof2_remote_refused_total")


def _moved(before: dict[str, float], now: dict[str, float], series: str) -> bool:
    return now.get(series, 0.0) != before.get(series, 0.0)


def test_neighbours_that_are_not_read_are_counted(tmp_path: Path) -> None:
    """And not fetched for long: of many small files one here and one there is read, then all of them in order."""
    size, count = 32 * 1024, 640
    tenants = {"default": {"kind": "files", "compression": "none"}}
    cache = {"page_cache_bytes": "16MiB"}  # of which packs as they came may take 2 MiB
    retention = {"undelete_window": "0s", "purge_after": "0s"}
    contents = [random.Random(n).randbytes(size) for n in range(count)]
    with mounted_volume(
        tmp_path, options=["nopassthrough"], tenants=tenants, timeout_s=200, cache=cache, retention=retention
    ) as v:
        paths = [v.path / f"f{n:04}" for n in range(count)]

        def cold(numbers: Iterable[int]) -> dict[str, float]:
            v.evict(v.path)
            for n in numbers:
                assert fresh(paths[n]) == contents[n]
            return metrics(v.mountpoint)

        for path, data in zip(paths, contents, strict=True):
            path.write_bytes(data)
        v.done("wait", v.path)
        start = metrics(v.mountpoint)
        whole = start["aof2_pack_window_bytes"]
        assert whole == MIB
        assert start["aof2_pack_bytes"] == start["aof2_pack_live_bytes"] > count * size / 2
        assert start["aof2_pack_amplification"] == 1
        rng = random.Random(3)
        now = cold(rng.sample(range(count), 60))
        assert now["aof2_pack_window_bytes"] <= whole / 4
        assert now["aof2_pack_neighbours_unread_bytes_total"] > whole
        before = now["aof2_pack_neighbours_bytes_total"]
        assert before > now["aof2_pack_neighbours_unread_bytes_total"]
        now = cold(rng.sample(range(count), 20))
        assert now["aof2_pack_neighbours_bytes_total"] - before < 20 * whole / 4
        now = cold(range(count))
        assert now["aof2_pack_window_bytes"] == whole
        for path in paths[::2]:
            path.unlink()
        v.done("gc")
        until(lambda: metrics(v.mountpoint)["aof2_pack_amplification"] > 1, "what is dead counts as needed")
        assert not v.complaints()


def test_damage_in_the_log_is_counted(tmp_path: Path) -> None:
    """A byte of the log is flipped while the volume is not mounted, a newer version has written an event to it, and the
    rows must be rebuilt from it."""
    with mounted_volume(tmp_path, tenants=TENANTS) as v:
        assert metrics(v.mountpoint)["manifest_crc_error_count"] == 0
        (v.path / "file").write_bytes(b"x" * 1000)
        v.done("wait", v.path / "file")
        v.umount()
        event = p.CustomEvent(400, PART_HEADER.pack(1, 0, 1) + b"of a later version")
        commit(load_settings(v.conf), lambda b: b.record(event, segment_id=0))
        chunk = min((v.state_dir / "manifest" / "1").glob("*.mlog"), key=lambda path: int(path.stem))
        data = bytearray(chunk.read_bytes())
        data[200] ^= 1
        chunk.write_bytes(data)
        for snapshot in (v.state_dir / "manifest" / "1").glob("snapshot_*.bin"):
            snapshot.unlink()
        shutil.rmtree(v.state_dir / "catalog")
        v.remount()
        for name in ("manifest_crc_error_count", "aof2_log_files_mended", "aof2_log_events_unknown"):
            assert metrics(v.mountpoint)[name] > 0, name


def test_a_writer_that_lost_the_volume_says_so(tmp_path: Path) -> None:
    with machine(tmp_path, "a") as a, machine(tmp_path, "b") as b:
        a.mount()
        (a.files / "file").write_bytes(b"x")
        a.ok("wait", a.files)
        assert metrics(a.mnt)["aof2_fenced"] == 0
        restore(b, tmp_path)
        b.mount()
        with contextlib.suppress(OSError):
            (a.files / "late").write_bytes(b"x")
        until(lambda: metrics(a.mnt)["aof2_fenced"] == 1, "the old writer does not notice", PATIENCE_S)
        assert metrics(a.mnt)["aof2_read_only"] == 1


def test_a_follower_says_how_far_it_is(tmp_path: Path) -> None:
    with pair(tmp_path) as p:
        (p.writer.path / "file").write_bytes(b"x")
        p.durable()
        until(
            lambda: metrics(p.follower.mountpoint)['aof2_follow_position{stream="1"}'] > 0, "it is nowhere", PATIENCE_S
        )
        assert metrics(p.writer.mountpoint)["aof2_follow_lag_seconds"] == 0
        until(lambda: bool(list((tmp_path / "remote" / "followers").glob("*.json"))), "no heartbeat", PATIENCE_S)
        p.writer.done("gc")
        assert metrics(p.writer.mountpoint)["aof2_followers"] == 1
        (tmp_path / "remote").rename(tmp_path / "away")
        until(lambda: metrics(p.follower.mountpoint)["aof2_follow_away"] == 1, "it is not noticed", PATIENCE_S)
        assert metrics(p.follower.mountpoint)["aof2_follow_lag_seconds"] > 0
        (tmp_path / "away").rename(tmp_path / "remote")


def test_a_file_whose_blob_is_lost_is_not_durable(tmp_path: Path) -> None:
    with mounted_volume(tmp_path, tenants=TENANTS) as v:
        lost, kept = v.path / "lost", v.path / "kept"
        for path in (lost, kept):
            path.write_bytes(path.name.encode() * 1000)
        v.done("wait", v.path)
        v.evict(lost)
        assert os.getxattr(lost, "user.aof2.durable") == b"1"
        blobs = list((v.remote / "checkpoints").rglob("*.blob"))
        sizes = {path: path.stat().st_size for path in blobs}
        for path in sizes:
            path.unlink()
        with pytest.raises(OSError, match="Input/output error"):
            fresh(lost)
        assert os.getxattr(lost, "user.aof2.durable") == b"0"
        assert v.json("status", lost)["durable"] is False
        assert os.getxattr(kept, "user.aof2.durable") == b"1"  # not asked for yet


# -- the JSON log --------------------------------------------------------------------------------------------------


def test_checkpoints_and_transitions_are_in_the_log(tmp_path: Path) -> None:
    with mounted_volume(tmp_path, tenants=TENANTS) as v:
        path = v.path / "file"
        path.write_bytes(half_random(1, 5 * MIB))
        v.done("wait", path)
        v.evict(path)
        fresh(path)
        v.done("wait", path)
        until(lambda: any(x.get("event") == "checkpoint.cleaned_up" for x in v.log()))
        events = [x for x in v.log() if str(x.get("event", "")).startswith("checkpoint.")]
        one = [x["event"].removeprefix("checkpoint.") for x in events if x["job_id"] == events[0]["job_id"]]
        assert one == ["started", "staged", "uploaded", "published", "cleaned_up"]
        staged, uploaded = events[1], events[2]
        assert staged["staged_chunks"] == uploaded["uploaded_blobs"] == 1
        chunk_id = v.json("status", path)["chunks"][0]["chunk_id"]
        until(lambda: "HydrationDone" in _actions(v, chunk_id), "no transition is logged")
        told = [x for x in v.log() if x.get("event") == "tier.transition" and x["segment_id"] == chunk_id]
        assert _actions(v, chunk_id)[:3] == ["SealSegment", "UploadDone", "LocalEvicted"]
        assert all({"stream_id", "offset", "chunk_index", "chunk_offset"} <= x.keys() for x in told)
        assert told[0]["offset"] == 5 * MIB
        # While the remote is away the upload fails, and says that it was the upload.
        v.remote.rename(v.remote.with_name("away"))
        (v.path / "late").write_bytes(half_random(2, MIB))
        until(lambda: any(x.get("event") == "checkpoint.failed" for x in v.log()))
        v.remote.with_name("away").rename(v.remote)
        failed = next(x for x in v.log() if x.get("event") == "checkpoint.failed")
        assert (failed["stage"], failed["retryable"]) == ("upload", True)
        v.done("wait", v.path / "late")


def test_a_segment_is_opened_with_its_file(tmp_path: Path) -> None:
    """Not when it is closed: a new file, and one that was in the remote and is written again."""
    with mounted_volume(tmp_path, tenants=TENANTS) as v:
        path = v.path / "file"
        for generation in (1, 2):
            with path.open("ab") as f:
                until(lambda: _opened(v, generation) == 1, "no SegmentOpened while it is open")  # noqa: B023
                assert _sealed(v) == generation - 1
                f.write(b"x")
            v.done("wait", path)
            assert _sealed(v) == generation
        chunk_id = v.json("status", path)["chunks"][0]["chunk_id"]
        opened = [r for r in _records(v) if r.segment_id == chunk_id and r.type == "SegmentOpened"]
        assert len(opened) == 1  # the id it was opened with


def _records(v: MountedVolume) -> list[Record]:
    return list(Stream(v.state_dir / "manifest" / "1").records())


def _opened(v: MountedVolume, generation: int) -> int:
    opened = (r.decoded() for r in _records(v) if r.type == "SegmentOpened")
    return sum(isinstance(r, p.SegmentOpened) and r.epoch == generation for r in opened)


def _sealed(v: MountedVolume) -> int:
    return sum(r.type == "SealSegment" for r in _records(v))


def _actions(v: MountedVolume, segment_id: int) -> list[str]:
    found = (x for x in v.log() if x.get("event") == "tier.transition" and x["segment_id"] == segment_id)
    return [x["action"] for x in found]
