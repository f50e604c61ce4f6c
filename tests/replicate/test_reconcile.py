"""The log against the listing: what is missing goes up again, what differs is named and left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.reconcile import Status, StreamReport, examine_stream
from aof2.engine.replicate.uploader import ReplicateOptions

from .helpers import TENANT, Rig, content_of, keys_of, make_file, open_directory, run_rig

SMALL_BUNDLES = ReplicateOptions(backoff_s=0.002, backoff_max_s=0.01, bundle_chunks=3)


def examine(r: Rig, *, deep: bool = False) -> StreamReport:
    return examine_stream(r.store, r.catalog, r.volume.directory(TENANT), TENANT, deep=deep)


def divergent(report: StreamReport) -> set[str]:
    return {finding.key for finding in report.of(Status.DIVERGENT)}


def status_of(report: StreamReport, name: str) -> Status:
    return next(f.status for f in report.objects if f.key == key(name))


def key(name: str) -> str:
    return f"manifest/{TENANT}/{name}"


def fill(root: Path, *, bundles: bool = False) -> RemoteStore:
    async def body(r: Rig) -> None:
        for i in range(10 if bundles else 3):
            await r.write(make_file(i))
            if bundles and i % 3 == 2:
                await r.snapshot()
        if not bundles:
            await r.snapshot()
            await r.write(make_file(99))
        for deep in (False, True):
            report = examine(r, deep=deep)
            assert report.clean, report
            assert {f.status for f in report.objects} == {Status.OK}

    run_rig(root, body, options=SMALL_BUNDLES if bundles else None)
    return open_directory(root)


def reopened(root: Path) -> tuple[StreamReport, StreamReport]:
    """The report of the start-up, and one made after it."""
    seen: list[StreamReport] = []

    async def body(r: Rig) -> None:
        await r.settle()
        seen.append(r.replicator.reports[TENANT])
        seen.append(examine(r, deep=True))

    run_rig(root, body)
    return seen[0], seen[1]


@pytest.mark.parametrize("name", ["2.mlog", "3.mlog", "snapshot_1.bin"])
def test_what_is_missing_and_here_is_put_again(tmp_path: Path, name: str) -> None:
    store = fill(tmp_path)
    before = content_of(store, key(name))
    store.delete([key(name)])

    report, after = reopened(tmp_path)
    assert status_of(report, name) is Status.REPUT
    assert content_of(store, key(name)) == before
    assert after.clean
    head = store.head_blob(key(name))
    assert head is not None
    assert head.metadata["writer_epoch"] == "2"


@pytest.mark.expects_warnings
def test_what_is_missing_everywhere_needs_repair(tmp_path: Path) -> None:
    store = fill(tmp_path, bundles=True)
    bundle = next(k for k in keys_of(store, f"manifest/{TENANT}/") if k.endswith(".mlogs"))
    store.delete([bundle])
    report, _ = reopened(tmp_path)
    (finding,) = report.of(Status.NEEDS_REPAIR)
    assert finding.key == bundle
    assert finding.covered
    assert "only history" in finding.detail
    assert not report.clean


@pytest.mark.expects_warnings
@pytest.mark.parametrize("harm", ["flip", "cut", "other"])
@pytest.mark.parametrize("name", ["2.mlog", "snapshot_1.bin"])
def test_other_bytes_are_reported_and_never_replaced(tmp_path: Path, name: str, harm: str) -> None:
    store = fill(tmp_path)
    path = tmp_path / "remote" / key(name)
    data = path.read_bytes()
    if harm == "flip":
        data = data[:100] + bytes([data[100] ^ 1]) + data[101:]
    elif harm == "cut":
        data = data[:-8]
    else:
        data = content_of(store, key("1.mlog"))
    path.unlink()
    path.write_bytes(data)
    report, after = reopened(tmp_path)
    assert divergent(report) == {key(name)}
    assert divergent(after) == {key(name)}
    assert path.read_bytes() == data


@pytest.mark.expects_warnings
def test_a_chunk_that_is_not_here_is_known_by_its_etag(tmp_path: Path) -> None:
    store = fill(tmp_path, bundles=True)
    chunks = [k for k in keys_of(store, f"manifest/{TENANT}/") if k.endswith(".mlog")]
    gone = next(k for k in chunks if not (tmp_path / "state" / k).exists())
    path = tmp_path / "remote" / gone
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    report, _ = reopened(tmp_path)
    assert divergent(report) == {gone}


@pytest.mark.expects_warnings
def test_a_chunk_past_our_end_is_another_writers(tmp_path: Path) -> None:
    store = fill(tmp_path)
    store.put_if_absent(key("77.mlog"), b"theirs")
    store.put_if_absent(key("notes.txt"), b"whatever")
    report, _ = reopened(tmp_path)
    assert divergent(report) == {key("77.mlog")}
    assert status_of(report, "notes.txt") is Status.UNKNOWN
