"""`aof2 manifest inspect`: exact values on clean logs, and as much as can be trusted of others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aof2 import native
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.format import LOG_SEGMENT_ID
from aof2.fs.cli import output, records
from tests.cli.logs import (
    EVERY_TYPE,
    KEYS,
    NOW_MS,
    fill,
    flip,
    make_bundle,
    make_log,
    objects,
    open_log,
    raw_chunk,
    run,
)


def test_every_type_is_shown_with_its_fields(tmp_path: Path) -> None:
    with open_log(tmp_path) as writer:
        for i, (payload, _) in enumerate(EVERY_TYPE):
            writer.append(payload, segment_id=i, logical_offset=i * 10, timestamp_ms=NOW_MS + i)
    result = run("manifest", "inspect", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    *rows, marker = objects(result)
    for i, (row, (payload, shown)) in enumerate(zip(rows, EVERY_TYPE, strict=True)):
        assert tuple(row) == KEYS
        assert row["type"] == type(payload).__name__
        assert (row["ordinal"], row["segment_id"], row["logical_offset"]) == (i, i, i * 10)
        assert (row["timestamp_ms"], row["flags"], row["chunk_index"]) == (NOW_MS + i, 0, 0)
        assert row["payload"] == shown
    assert rows[0]["chunk_offset"] == 64
    assert rows[1]["chunk_offset"] == 64 + 40 + 16
    data = (tmp_path / "0.mlog").read_bytes()
    at = marker["chunk_offset"]
    assert marker == {
        "chunk_index": 0,
        "chunk_offset": at,
        "ordinal": len(rows),
        "type": "CustomEvent",
        "type_id": 15,
        "flags": 0,
        "segment_id": LOG_SEGMENT_ID,
        "logical_offset": len(rows),
        "timestamp_ms": NOW_MS,
        "payload": {"schema_id": 1, "span_start": 64, "span_crc64": native.crc64(data[64:at]), "durable_len": 64},
    }


def test_plain_lines_have_a_header_and_ten_cells(tmp_path: Path) -> None:
    with open_log(tmp_path) as writer:
        for payload, _ in EVERY_TYPE:
            writer.append(payload)
    lines = run("manifest", "inspect", tmp_path).stdout.splitlines()
    assert lines[0].split("\t") == list(KEYS)
    assert len(lines) == len(EVERY_TYPE) + 2
    assert all(len(line.split("\t")) == 10 for line in lines)
    assert json.loads(lines[1].split("\t")[-1]) == {"base_offset": 0, "epoch": 1}


def test_from_type_and_limit(tmp_path: Path) -> None:
    make_log(tmp_path)
    rows = objects(run("manifest", "inspect", tmp_path, "--json", "--from", 2))
    assert [row["ordinal"] for row in rows] == list(range(10, 20))
    rows = objects(run("manifest", "inspect", tmp_path, "--json", "--type", "segmentopened", "--limit", 6))
    assert [row["segment_id"] for row in rows] == list(range(6))
    past = run("manifest", "inspect", tmp_path, "--json", "--from", 99)
    assert (past.exit_code, past.stdout) == (0, "")
    wrong = run("manifest", "inspect", tmp_path, "--type", "Nonsense")
    assert wrong.exit_code == 2
    assert "SegmentOpened" in wrong.stderr


def test_bundles_read_like_chunks(tmp_path: Path) -> None:
    make_log(tmp_path, 4)
    before = run("manifest", "inspect", tmp_path, "--json").stdout
    make_bundle(tmp_path, 0, 2)
    after = run("manifest", "inspect", tmp_path, "--json")
    assert (after.exit_code, after.stdout) == (0, before)


def test_unknown_types_keep_flags_and_bytes(tmp_path: Path) -> None:
    raw_chunk(tmp_path, [(42, 0x8001, 7, b"newthing"), (0, 0, 8, p.encode(p.SegmentOpened(1, 2))[1])])
    result = run("manifest", "inspect", tmp_path, "--json")
    assert result.exit_code == 0, result.stderr
    unknown, known = objects(result)
    assert (unknown["type"], unknown["type_id"], unknown["flags"]) == ("Unknown42", 42, 0x8001)
    assert unknown["payload"] == {"raw": b"newthing".hex()}
    assert known["payload"] == {"base_offset": 1, "epoch": 2}
    only = objects(run("manifest", "inspect", tmp_path, "--json", "--type", "Unknown42"))
    assert [row["type_id"] for row in only] == [42]


def test_flags_on_a_known_type_are_refused(tmp_path: Path) -> None:
    raw_chunk(tmp_path, [(0, 1, 8, p.encode(p.SegmentOpened(1, 2))[1])])
    result = run("manifest", "inspect", tmp_path, "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "upgrade" in result.stderr


def test_payload_that_lies_is_shown_raw_and_is_damage(tmp_path: Path) -> None:
    raw_chunk(tmp_path, [(5, 0, 1, b"\xff\xff......"), (10, 0, 1, bytes([2]) + bytes(7))])
    result = run("manifest", "inspect", tmp_path, "--json")
    assert result.exit_code == 1
    assert [row["payload"] for row in objects(result)] == [{"raw": "ffff2e2e2e2e2e2e"}, {"source_tier": 2}]
    assert "chunk 0" in result.stderr


def test_torn_tail_is_a_note(tmp_path: Path) -> None:
    make_log(tmp_path)
    path = tmp_path / "3.mlog"
    data = bytearray(path.read_bytes())
    end = int.from_bytes(data[40:48], "little")
    data[end : end + 56] = b"x" * 56
    path.write_bytes(data)
    result = run("manifest", "inspect", tmp_path, "--json")
    assert result.exit_code == 0
    assert len(objects(result)) == 20
    assert len(result.stderr.splitlines()) == 1
    assert "56 uncommitted bytes" in result.stderr


def test_log_being_written_shows_what_is_committed(tmp_path: Path) -> None:
    with open_log(tmp_path) as writer:
        fill(writer, 0)
        assert len(objects(run("manifest", "inspect", tmp_path, "--json"))) == 5
        writer.append(p.LocalEvicted(1), segment_id=9)
        result = run("manifest", "inspect", tmp_path, "--json")
        assert (result.exit_code, len(objects(result))) == (0, 5)
        assert "48 uncommitted bytes" in result.stderr
        writer.commit()
        assert len(objects(run("manifest", "inspect", tmp_path, "--json"))) == 7
        writer.rotate()
        assert len(objects(run("manifest", "inspect", tmp_path, "--json"))) == 7


def test_rows_up_to_the_damage_then_the_next_chunks(tmp_path: Path) -> None:
    make_log(tmp_path)
    flip(tmp_path / "1.mlog", 64 + 2 * 56 + 40)  # third record's payload
    result = run("manifest", "inspect", tmp_path, "--json")
    assert result.exit_code == 1
    assert [row["ordinal"] for row in objects(result)] == [*range(7), *range(10, 20)]
    (line,) = result.stderr.splitlines()
    assert line.startswith("aof2: ")
    assert "chunk 1" in line
    assert f"byte {64 + 2 * 56}" in line


def test_damage_that_cannot_be_placed_hides_its_commit(tmp_path: Path) -> None:
    with open_log(tmp_path) as writer:
        fill(writer, 0)
        fill(writer, 4)
        writer.rotate()
    second_commit = 64 + 4 * 56 + 72
    flip(tmp_path / "0.mlog", second_commit + 8)  # a segment id: no payload checksum covers it
    result = run("manifest", "inspect", tmp_path, "--json")
    assert result.exit_code == 1
    assert [row["ordinal"] for row in objects(result)] == list(range(5))
    assert "chunk 0" in result.stderr


def test_damaged_header_and_missing_chunk(tmp_path: Path) -> None:
    make_log(tmp_path, 5)
    flip(tmp_path / "1.mlog", 0)
    (tmp_path / "3.mlog").unlink()
    result = run("manifest", "inspect", tmp_path, "--json")
    assert result.exit_code == 1
    assert [row["chunk_index"] for row in objects(result)[::5]] == [0, 2, 4, 5]
    first, second = result.stderr.splitlines()
    assert "1.mlog" in first
    assert "chunk 3 is missing" in second
    assert "chunk 3 is missing" in run("manifest", "inspect", tmp_path, "--from", 3).stderr
    assert run("manifest", "inspect", tmp_path, "--from", 4).exit_code == 0


def test_damaged_bundle_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    make_log(tmp_path, 4)
    size = (tmp_path / "0.mlog").stat().st_size
    flip(make_bundle(tmp_path, 0, 3), 2 * size)  # magic of chunk 2
    result = run("manifest", "inspect", tmp_path, "--json")
    assert result.exit_code == 1
    assert [row["chunk_index"] for row in objects(result)[::5]] == [0, 1, 4]
    assert "bundle-0-3.mlogs" in result.stderr


@pytest.mark.parametrize("as_json", [["--json"], []])
def test_a_folder_without_chunks_is_noted(tmp_path: Path, as_json: list[str]) -> None:
    result = run("manifest", "inspect", tmp_path, *as_json)
    assert result.exit_code == 0
    assert "no manifest chunks" in result.stderr


def test_table_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    with open_log(tmp_path) as writer:
        writer.append(p.UploadDone("k\x1b[31m", "e"), segment_id=3)
        writer.append(p.LocalEvicted(5), segment_id=4, timestamp_ms=2**64 - 1)
    text = run("manifest", "inspect", tmp_path).stdout
    assert "2023-11-14T22:13:20.123" in text
    assert str(2**64 - 1) in text
    assert "reclaimed_bytes=5" in text
    assert "log" in text
    assert "\x1b" not in text
    assert records.style("UploadFailed") != records.style("UploadDone") != records.style("HydrationDone")
