"""`aof2 manifest verify` and the checker behind it: clean logs pass, every kind of damage is named."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from aof2.engine.env import Env
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.check import CheckReport, check
from aof2.engine.manifest.chunk import mark_uploaded
from aof2.engine.manifest.examine import Kind
from aof2.engine.manifest.format import LogPosition, ManifestIntegrityError
from aof2.engine.manifest.index import ManifestIndex
from aof2.engine.manifest.quarantine import quarantine
from aof2.engine.manifest.snapshot import encode_snapshot
from tests.cli.logs import EVERY_TYPE, fill, flip, make_bundle, make_log, open_log, raw_chunk, run
from tests.manifest.replay import replay, take_snapshot


def kinds(report: CheckReport) -> list[Kind]:
    return [finding.kind for finding in report.damage]


def test_clean_log(tmp_path: Path) -> None:
    make_log(tmp_path, 5, snapshot_after=2)
    result = run("manifest", "verify", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert (report["clean"], report["damage"], report["notes"]) == (True, [], [])
    assert (report["chunks"], report["first_chunk"], report["last_chunk"]) == (6, 0, 5)
    assert (report["sealed_chunks"], report["snapshots"], report["segments"]) == (5, 1, 24)
    assert report["records"] == report["next_ordinal"] == 6 * 5 + 2
    assert report["types"] == {"SegmentOpened": 24, "SnapshotMarker": 1, "CustomEvent": 7}
    assert (report["replay_ok"], report["replayed_snapshot_id"]) == (True, 1)
    plain = run("manifest", "verify", tmp_path)
    assert plain.exit_code == 0
    assert "verdict\tclean" in plain.stdout


def test_every_type_replays(tmp_path: Path) -> None:
    with open_log(tmp_path) as writer:
        for payload, _ in EVERY_TYPE:
            writer.append(payload, segment_id=1)
        take_snapshot(writer, replay_now(writer, tmp_path))
    report = check(tmp_path)
    assert report.clean, report.damage


def replay_now(writer, tmp_path: Path) -> ManifestIndex:
    writer.commit()
    return replay(tmp_path)


@pytest.mark.parametrize("point", ["payload", "segment_id", "committed_len", "crc", "magic", "base_record", "tail"])
@pytest.mark.parametrize("chunk", [0, 2])
def test_flipped_bit(tmp_path: Path, point: str, chunk: int) -> None:
    make_log(tmp_path)
    offsets = {
        "payload": 64 + 40,
        "segment_id": 64 + 8,
        "committed_len": 40,
        "crc": 48,
        "magic": 0,
        "base_record": 24,
        "tail": 32,
    }
    flip(tmp_path / f"{chunk}.mlog", offsets[point], 3)
    result = run("manifest", "verify", tmp_path)
    assert result.exit_code == 1
    assert f"{chunk}.mlog" in result.stderr
    assert all(line.startswith("aof2: ") for line in result.stderr.splitlines())


def test_no_flip_of_a_committed_byte_goes_unseen(tmp_path: Path) -> None:
    """Sealed chunks, any bit: only the `uploaded` flag has nothing to be held against."""
    clean = make_log(tmp_path / "clean")
    rng = random.Random(5)
    path = clean / "1.mlog"
    places = [*range(64), *rng.sample(range(64, path.stat().st_size), 60)]
    for offset in places:
        bit = rng.randrange(8)
        if (offset, bit) == (56, 1):
            continue
        hurt = tmp_path / "hurt"
        shutil.copytree(clean, hurt)
        flip(hurt / "1.mlog", offset, bit)
        assert not check(hurt).clean, (offset, bit)
        shutil.rmtree(hurt)


def test_missing_chunk(tmp_path: Path) -> None:
    make_log(tmp_path, 5)
    (tmp_path / "2.mlog").unlink()
    report = check(tmp_path)
    assert kinds(report) == [Kind.GAP]
    assert report.damage[0].chunk_index == 2
    assert not report.replay_ok


def test_start_of_the_log_gone(tmp_path: Path) -> None:
    make_log(tmp_path, 5)
    (tmp_path / "0.mlog").unlink()
    assert kinds(check(tmp_path)) == [Kind.RETENTION]


def test_retained_tail_with_its_snapshot_is_clean(tmp_path: Path) -> None:
    make_log(tmp_path, 6, snapshot_after=3)
    for i in range(4):
        (tmp_path / f"{i}.mlog").unlink()
    report = check(tmp_path)
    assert report.clean, report.damage
    assert (report.replay_ok, report.first_chunk, report.segments) == (True, 4, 28)
    (tmp_path / "4.mlog").unlink()
    report = check(tmp_path)
    assert kinds(report) == [Kind.RETENTION]
    assert not report.replay_ok


def test_damaged_snapshot(tmp_path: Path) -> None:
    make_log(tmp_path, snapshot_after=1)
    flip(tmp_path / "snapshot_1.bin", 120)
    result = run("manifest", "verify", tmp_path)
    assert result.exit_code == 1
    assert "snapshot_1.bin" in result.stderr
    assert "replay\tworks, from the start" in result.stdout


def store(tmp_path: Path, index: ManifestIndex, position: LogPosition) -> None:
    data = encode_snapshot(index, snapshot_id=9, position=position, created_ms=1)
    (tmp_path / "snapshot_9.bin").write_bytes(b"".join(data))


@pytest.mark.parametrize(
    ("position", "says"),
    [
        ((1, 65, 5), "no record starts"),
        ((1, 64, 6), "says record 6"),
        ((9, 64, 0), "past the end"),
        ((3, 1 << 20, 20), "no record starts"),
    ],
)
def test_snapshot_at_a_place_that_does_not_exist(tmp_path: Path, position: tuple[int, int, int], says: str) -> None:
    make_log(tmp_path)
    store(tmp_path, replay(tmp_path), LogPosition(*position))
    report = check(tmp_path)
    assert says in " ".join(finding.message for finding in report.damage if finding.kind is Kind.SNAPSHOT)


def test_snapshot_right_after_a_rotation_and_at_the_end(tmp_path: Path) -> None:
    with open_log(tmp_path) as writer:
        fill(writer, 0)
        writer.rotate()
        store(tmp_path, replay(tmp_path), writer.position)
        assert writer.position == (1, 64, 5)
        assert check(tmp_path).clean
        fill(writer, 4)
        assert check(tmp_path).clean


def test_snapshot_that_disagrees_with_the_log(tmp_path: Path) -> None:
    make_log(tmp_path)
    index = ManifestIndex()
    index.apply(0, 77, 1, p.encode(p.SegmentOpened(1, 1))[1])
    store(tmp_path, index, LogPosition(1, 64, 5))
    (finding,) = check(tmp_path).damage
    assert finding.kind is Kind.SNAPSHOT
    assert "disagree, on 5 segment(s)" in finding.message


def test_older_snapshot_the_log_no_longer_reaches_is_a_note(tmp_path: Path) -> None:
    with open_log(tmp_path) as writer:
        for i in range(4):
            fill(writer, i * 4)
            take_snapshot(writer, replay(tmp_path))
            writer.rotate()
    (tmp_path / "0.mlog").unlink()
    (tmp_path / "1.mlog").unlink()
    report = check(tmp_path)
    assert report.clean, report.damage
    assert [note.kind for note in report.notes] == [Kind.SNAPSHOT] * 2


def test_bundles(tmp_path: Path) -> None:
    make_log(tmp_path, 4)
    mark_uploaded(Env(), tmp_path / "1.mlog", sync=False)
    bundle = make_bundle(tmp_path, 0, 2, keep=True)
    report = check(tmp_path)
    assert report.clean, report.damage
    assert (report.bundles, report.chunks, report.uploaded_chunks) == (1, 5, 1)
    flip(bundle, 64 + 40)
    assert kinds(check(tmp_path)) == [Kind.BUNDLE]
    for i in range(3):
        (tmp_path / f"{i}.mlog").unlink()
    report = check(tmp_path)
    assert kinds(report) == [Kind.BUNDLE]
    assert not report.replay_ok


def test_two_bundles_with_the_same_chunk(tmp_path: Path) -> None:
    make_log(tmp_path, 4)
    make_bundle(tmp_path, 0, 2, keep=True)
    make_bundle(tmp_path, 2, 3, keep=True)
    assert kinds(check(tmp_path)) == [Kind.BUNDLE]


def test_bundled_copy_of_another_log(tmp_path: Path) -> None:
    make_log(tmp_path / "a", 2)
    with open_log(tmp_path / "b") as writer:
        fill(writer, 100)
        writer.rotate()
    make_bundle(tmp_path / "b", 0, 0).rename(tmp_path / "a" / "bundle-0-0.mlogs")
    assert kinds(check(tmp_path / "a")) == [Kind.BUNDLE]


def test_notes_are_no_damage(tmp_path: Path) -> None:
    raw_chunk(tmp_path, [(42, 1, 7, b"newthing"), (42, 0, 7, b"newthing")])
    quarantine(Env(), tmp_path, ManifestIntegrityError("was odd", chunk_index=0, offset=64))
    result = run("manifest", "verify", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["unknown_types"] == {"42": 2}
    assert report["quarantine"]["offset"] == 64
    assert [note["kind"] for note in report["notes"]] == ["unknown_type", "quarantine"]


def test_incomplete_event_is_counted(tmp_path: Path) -> None:
    part = (1).to_bytes(8, "little") + (0).to_bytes(4, "little") + (2).to_bytes(4, "little") + b"half"
    records = [(15, 0, 0, p.encode_event(16, part))] * 2
    raw_chunk(tmp_path, records)
    report = check(tmp_path)
    assert (report.clean, report.incomplete_events) == (True, 1)


def test_undecodable_record_stops_replay(tmp_path: Path) -> None:
    raw_chunk(tmp_path, [(5, 0, 1, b"\xff\xff......")])
    report = check(tmp_path)
    assert kinds(report) == [Kind.REPLAY]
    assert not report.replay_ok


def test_log_being_written(tmp_path: Path) -> None:
    with open_log(tmp_path) as writer:
        assert check(tmp_path).clean
        fill(writer, 0)
        writer.append(p.LocalEvicted(1), segment_id=9)
        report = check(tmp_path)
        assert (report.clean, report.records, report.torn_bytes) == (True, 5, 48)
        assert [note.kind for note in report.notes] == [Kind.TORN]


def test_chunk_without_a_commit_is_a_note(tmp_path: Path) -> None:
    make_log(tmp_path)
    (tmp_path / "4.mlog").write_bytes(bytes(16 << 10))
    end = (tmp_path / "3.mlog").read_bytes()
    (tmp_path / "3.mlog").write_bytes(end[:56] + (1).to_bytes(8, "little") + end[64:])
    report = check(tmp_path)
    assert report.clean, report.damage
    assert [note.kind for note in report.notes] == [Kind.EMPTY]
    assert report.replay_ok


def test_folder_that_changes_meanwhile_is_looked_at_again(tmp_path: Path) -> None:
    """Retention removes chunks while the check runs: that is no hole."""
    make_log(tmp_path, 6, snapshot_after=4)
    (tmp_path / "0.mlog").unlink()  # covered by the snapshot

    def meanwhile(done: int, _total: int) -> None:
        if done == 1:
            (tmp_path / "2.mlog").unlink(missing_ok=True)
            (tmp_path / "1.mlog").unlink(missing_ok=True)

    report = check(tmp_path, on_progress=meanwhile)
    assert report.clean, report.damage


def test_many_chunks_with_progress(tmp_path: Path) -> None:
    make_log(tmp_path, 300)
    seen: list[tuple[int, int]] = []
    report = check(tmp_path, on_progress=lambda done, total: seen.append((done, total)))
    assert report.clean
    assert seen[-1] == (301, 301)
