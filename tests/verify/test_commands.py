"""`aof2 verify`, `status` and `why` as people and scripts meet them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from aof2.engine.settings import Settings, load_settings
from aof2.engine.volume import Volume
from tests.cli.logs import run
from tests.engine.helpers import put_object, read_object, run_volume
from tests.verify.build import flip

CONF = """
[volume]
mountpoint = "mnt"
state_dir = "state"
[remote]
url = "file://remote"
[cache]
hot_bytes = "64MiB"
warm_bytes = 0
page_cache_bytes = "16MiB"
min_free = "1MiB"
[tenants.default]
kind = "files"
"""
SIZE = (2 << 20) + 17


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "mount.conf"
    path.write_text(CONF)
    return path


@pytest.fixture
def volume(conf: Path) -> Iterator[Settings]:
    settings = load_settings(conf)

    async def body(v: Volume) -> None:
        one = await put_object(v, "default", b"one", bytes(range(256)) * (SIZE // 256) + bytes(SIZE % 256))
        await v.checkpoint("default")
        await v.evict([one])
        await read_object(v, one, 0, 10)
        await put_object(v, "default", b"two", b"two")

    run_volume(settings, body, parts=("jobs",))
    yield settings


def test_a_clean_volume(volume: Settings, conf: Path) -> None:
    plain = run("verify", "--conf", conf)
    assert plain.exit_code == 0, plain.output
    assert "verdict\tclean\n" in plain.stdout
    shown = run("verify", "--conf", conf, "--remote", "--json")
    report = json.loads(shown.stdout)
    assert shown.exit_code == report["exit_code"] == 0
    assert (report["clean"], report["errors"], report["warnings"], report["remote"]) == (True, 0, 0, "read")
    assert report["evictions"] == 1


def test_codes_and_lines(volume: Settings, conf: Path) -> None:
    (two,) = [f for f in (volume.volume.state_dir / "hot_cache/default").iterdir() if f.stat().st_size > 3]
    flip(two, 5)
    found = run("verify", "--conf", conf)
    assert found.exit_code == 4
    assert "error: local_damaged: " in found.stderr
    assert "; --repair mends it" in found.stderr
    shown = run("verify", "--conf", conf, "--json")
    (finding,) = [f for f in json.loads(shown.stdout)["findings"] if f["severity"] != "note"]
    assert finding["kind"] == "local_damaged"
    assert finding["repairable"] is True
    assert finding["fix"]["do"] == "clear_blocks"
    mended = run("verify", "--conf", conf, "--repair", "--jobs", 1)
    assert mended.exit_code == 1
    assert "repaired: " in mended.stderr
    assert run("verify", "--conf", conf, "--remote").exit_code == 0


def test_usage_and_what_cannot_run(conf: Path, tmp_path: Path) -> None:
    assert run("verify", "--nonsense").exit_code == 16
    assert run("verify", "--jobs", "0").exit_code == 16
    assert run("status", "--nonsense").exit_code == 2
    for arguments in (("--conf", tmp_path / "none.conf"), ("--conf", conf)):
        result = run("verify", *arguments)
        assert (result.exit_code, result.stdout) == (8, "")
        assert len(result.stderr.splitlines()) == 1
    assert "no volume here" in run("status", "--conf", conf).stderr


def test_a_path_that_is_not_there(volume: Settings, conf: Path) -> None:
    assert run("verify", "default/three", "--conf", conf).exit_code == 8
    for path, says in (("default/three", "no such file"), ("nobody/x", "no tenant"), ("/etc/passwd", "not below")):
        result = run("status", path, "--conf", conf)
        assert result.exit_code == 1
        assert says in result.stderr


def test_status_of_the_volume(volume: Settings, conf: Path) -> None:
    status = json.loads(run("status", "--conf", conf, "--json").stdout)
    (tenant,) = status["tenants"]
    assert (tenant["tenant"], tenant["objects"], tenant["bytes"]) == ("default", 2, SIZE + 3)
    assert tenant["dirty_bytes"] == status["dirty_bytes"] == 3
    assert tenant["remote_bytes"] > 0
    assert (status["hot_limit_bytes"], status["live"], status["needs_repair"]) == (64 << 20, False, 0)
    assert set(status["jobs"]) == {"queued", "running", "done", "failed", "cancelled"}
    assert status["log_bytes"] > 0
    plain = run("status", "--conf", conf).stdout
    assert "dirty\t3B\n" in plain or "dirty\t3 B\n" in plain
    assert "\ndefault\tfiles\t2\t" in plain


def test_status_of_files_and_folders(volume: Settings, conf: Path) -> None:
    one = json.loads(run("status", volume.volume.mountpoint / "default/one", "--conf", conf, "--json").stdout)
    assert (one["size"], one["generation"], one["state"]) == (SIZE, 1, "published")
    # Its blob is in the remote; nothing uploads the log of this volume.
    assert (one["durable"], one["dirty"], one["sealed"]) == (False, False, True)
    assert 0 < one["hot_bytes"] <= SIZE
    assert one["remote_bytes"] == SIZE
    (chunk,) = one["chunks"]
    assert chunk["sha256"] == one["sha256"]
    assert chunk["key"].startswith("checkpoints/default/1/chunk-")
    two = json.loads(run("status", "default/two", "--conf", conf, "--json").stdout)
    assert (two["durable"], two["dirty"], two["remote_bytes"], two["chunks"][0]["key"]) == (False, True, 0, "")
    tree = json.loads(run("status", "default", "--conf", conf, "--json").stdout)
    assert (tree["objects"], tree["bytes"], tree["durable"], tree["dirty_objects"]) == (2, SIZE + 3, False, 1)
    assert "durable\tno\n" in run("status", "default/one", "--conf", conf).stdout
    assert "files\t2\n" in run("status", "default", "--conf", conf).stdout


def test_status_with_the_catalog_gone(volume: Settings, conf: Path) -> None:
    before = run("status", "default/one", "--conf", conf, "--json").stdout
    (volume.volume.state_dir / "catalog" / "trust.json").unlink()
    assert run("status", "default/one", "--conf", conf, "--json").stdout == before


def test_why(volume: Settings, conf: Path) -> None:
    found = json.loads(run("why", "default/one", "--conf", conf, "--json").stdout)
    events = [step["event"] for step in found["steps"]]
    assert events[:5] == ["SegmentOpened", "SealSegment", "UploadStarted", "UploadDone", "LocalEvicted"]
    assert events[5] == "HydrationStarted"
    assert "HydrationDone" in events[6:]
    assert (found["earlier_records"], found["damage"]) == (0, [])
    evicted = found["steps"][4]
    assert (evicted["bytes"], evicted["source"]) == (SIZE, "hot")
    assert found["steps"][5]["source"] == "remote"
    plain = run("why", "default/one", "--conf", conf)
    assert plain.stdout.count("\n") == len(events) + 1
    assert run("why", "default", "--conf", conf).exit_code == 1


def test_the_script_is_the_verb(volume: Settings, conf: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "verify"
    text = script.read_text()
    assert 'verify "$@"' in text
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
