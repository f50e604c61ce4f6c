"""`generations`, `revert`, `jobs`, `gc` and `changes` through a real mount, by the command a user calls."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from aof2.fs.control.protocol import ControlError
from tests.support.mount import AOF2, MountedVolume, mounted_volume, until

MIB = 1 << 20


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MountedVolume]:
    root = tmp_path_factory.mktemp("verbs")
    sections = {"retention": {"checkpoints": 3, "purge_after": "0s"}, "manifest": {"shadow": True}}
    with mounted_volume(root, timeout_s=0, **sections) as volume:
        yield volume
        with volume.deadline():
            metrics = (volume.mountpoint / ".aof2" / "metrics").read_text()
            [divergence] = [line for line in metrics.splitlines() if line.startswith("manifest_shadow_divergence ")]
            assert float(divergence.split()[1]) == 0
            assert not volume.complaints()
            volume.umount()
            verified = volume.aof2("verify", "--remote")
            assert not verified.returncode, verified.stdout + verified.stderr


@pytest.fixture
def volume(shared: MountedVolume) -> Iterator[MountedVolume]:
    with shared.deadline():
        yield shared


def lines(volume: MountedVolume, *args: object) -> list[dict[str, object]]:
    return [json.loads(line) for line in volume.done(*args, "--json").splitlines()]


def asked(volume: MountedVolume, verb: str, says: str, **args: object) -> None:
    """The daemon refuses, with this; as `refused`, without a process for it."""
    with pytest.raises(ControlError, match=says):
        volume.ask(verb, **args)


def named(volume: MountedVolume, path: Path) -> str:
    return str(path.relative_to(volume.mountpoint))


def refused(volume: MountedVolume, *args: object, says: str) -> None:
    ran = volume.aof2(*args)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert ran.stderr.count("\n") == 1 and says in ran.stderr, ran.stderr


def written(volume: MountedVolume, path: Path, *contents: bytes) -> None:
    """The file, with a published generation for each of these."""
    for data in contents:
        with open(path, "wb" if not path.exists() else "r+b") as f:
            f.write(data)
            f.truncate()
        volume.ask("wait", paths=[str(path.relative_to(volume.mountpoint))])


def numbers(volume: MountedVolume, path: Path) -> list[int]:
    return [one["generation"] for one in volume.ask("generations", path=str(path.relative_to(volume.mountpoint)))]


# -- generations -----------------------------------------------------------------------------------------------------


def test_a_generation_comes_back(volume: MountedVolume) -> None:
    path = volume.path / "file"
    first, second = random.Random(1).randbytes(3 * MIB + 5), b"second"
    written(volume, path, first, second)
    found = lines(volume, "generations", path)
    assert [(one["generation"], one["state"], one["current"], one["size"]) for one in found] == [
        (2, "published", True, 6),
        (1, "published", False, len(first)),
    ]
    volume.done("revert", path, "--generation", 1)
    assert path.read_bytes() == first
    assert path.stat().st_size == len(first)
    assert numbers(volume, path) == [3, 2, 1]
    volume.ask("revert", path=named(volume, path), generation=2)  # a revert can be reverted
    assert path.read_bytes() == second
    assert os.getxattr(path, "user.aof2.generation") == b"4"
    volume.evict(path)
    assert path.read_bytes() == second


def test_beside_the_file(volume: MountedVolume) -> None:
    path, beside = volume.path / "both", volume.path / "folder" / "before"
    beside.parent.mkdir()
    path.write_bytes(b"")
    path.chmod(0o640)
    os.chown(path, 65534, 65533)
    written(volume, path, b"old content", b"new")
    sealed_ms = lines(volume, "generations", path)[1]["sealed_ms"]
    assert not beside.exists()  # and the kernel may remember that
    done = volume.json("revert", path, "--generation", numbers(volume, path)[1], "--to", beside)
    assert done["path"] == str(beside)
    assert (beside.read_bytes(), path.read_bytes()) == (b"old content", b"new")
    st = beside.stat()
    assert (st.st_mode & 0o7777, st.st_uid, st.st_gid) == (0o640, 65534, 65533)
    assert st.st_mtime_ns // 1_000_000 == sealed_ms
    beside.write_bytes(b"its own")
    assert path.read_bytes() == b"new"
    where = named(volume, path)
    asked(volume, "revert", "there is something of that name", path=where, generation=1, to=named(volume, beside))
    asked(volume, "revert", "another tenant", path=where, generation=1, to="other/x")


def test_what_the_file_is_now_is_kept_first(volume: MountedVolume) -> None:
    """Not yet in the remote when it is reverted: it gets there, and is a generation to go back to."""
    path = volume.path / "unsealed"
    written(volume, path, b"one")
    path.write_bytes(b"two, just written")
    volume.ask("revert", path=named(volume, path), generation=1)
    assert path.read_bytes() == b"one"
    volume.ask("revert", path=named(volume, path), generation=2)
    assert path.read_bytes() == b"two, just written"


def test_what_cannot_be_reverted(volume: MountedVolume) -> None:
    path = volume.path / "open"
    written(volume, path, b"one", b"two")
    refused(volume, "revert", path, "--generation", 9, says="there is no published generation 9; there are 1, 2")
    asked(volume, "revert", "is what it is now", path=named(volume, path), generation=2)
    asked(volume, "revert", "not a file", path="default", generation=1)
    refused(volume, "generations", volume.path / "nothing", says="no such file")
    with open(path, "rb") as f:
        assert f.read() == b"two"
        asked(volume, "revert", "it is open", path=named(volume, path), generation=1)
        volume.ask("revert", path=named(volume, path), generation=1, to="default/open.1")
    assert (volume.path / "open.1").read_bytes() == b"one"


def test_generations_while_nothing_is_mounted(tmp_path: Path) -> None:
    with mounted_volume(tmp_path) as volume:
        path = volume.path / "file"
        written(volume, path, b"one", b"two")
        mounted = lines(volume, "generations", path)
        volume.umount()
        down = lines(volume, "generations", path)
        keys = ("generation", "state", "size", "sha256")
        assert [[one[k] for k in keys] for one in down] == [[one[k] for k in keys] for one in mounted]
        refused(volume, "revert", path, "--generation", 1, says="not mounted")
        assert lines(volume, "jobs", "list")


# -- gc --------------------------------------------------------------------------------------------------------------


def blobs(volume: MountedVolume) -> int:
    return sum(1 for _ in volume.remote.rglob("*.blob"))


def test_gc_lets_go_of_what_retention_does_not_keep(volume: MountedVolume) -> None:
    """Three generations are kept here. (It goes by itself, too, after a second.)"""
    path = volume.path / "often"
    volume.ask("gc")
    before = blobs(volume)
    written(volume, path, *(b"content %d" % i for i in range(6)))
    volume.done("gc")
    until(lambda: numbers(volume, path) == [6, 5, 4] or not volume.ask("gc"), "old generations stay")
    assert path.read_bytes() == b"content 5"
    until(lambda: blobs(volume) == before + 3 or not volume.ask("gc"), "their blobs stay")
    [forecast] = lines(volume, "gc", "default", "--dry-run")
    assert (forecast["dry_run"], forecast["generations"], forecast["blobs"]) == (True, 0, 0)
    refused(volume, "gc", "nobody", says="there is no tenant 'nobody'")


# -- jobs ------------------------------------------------------------------------------------------------------------


def test_every_type_can_be_started_and_seen(volume: MountedVolume) -> None:
    path = volume.path / "worked-on"
    written(volume, path, random.Random(2).randbytes(MIB))
    volume.evict(path)
    for kind, name in (("download", "DownloadCheckpoint"), ("prune", "PruneCheckpoint")):
        [job] = volume.ask("jobs", action="start", type=kind, tenant="default", wait=True)
        assert (job["type"], job["state"]) == (name, "done")
        assert job["job"] in {one["job"] for one in volume.ask("jobs")}
    assert os.getxattr(path, "user.aof2.residency") == b"1.000"
    ran = volume.aof2("jobs", "start", "truncate", "default", "--wait", "--json")
    assert ran.returncode == 1
    failed = json.loads(ran.stdout)
    assert (failed["type"], failed["state"]) == ("TruncateAppendOnly", "failed") and "refused" in failed["reason"]
    shown = volume.done("jobs", "show", failed["job"])
    assert "TruncateAppendOnly" in shown and "refused" in shown
    assert [one["job"] for one in lines(volume, "jobs", "list", "--state", "failed")] == [failed["job"]]
    volume.done("jobs", "cancel", failed["job"])
    assert not [one for one in volume.ask("jobs") if one["state"] == "failed"]
    asked(volume, "jobs", "nothing to cancel", action="cancel", job=failed["job"])
    asked(volume, "jobs", "nothing to retry", action="retry", job=failed["job"])
    refused(volume, "jobs", "show", "default/99999", says="there is no such job")
    report = lines(volume, "jobs", "start", "verify", "default", "--wait")[0]["report"]
    assert isinstance(report, dict) and report["good"] == report["blobs"] > 0
    types = (
        {one["type"] for one in lines(volume, "jobs")}
        if False
        else {one["type"] for one in lines(volume, "jobs", "list")}
    )
    assert "CreateCheckpoint" in types
    assert "PruneCheckpoint" in volume.done("jobs")
    assert "PruneCheckpoint" in {one["type"] for one in lines(volume, "jobs")}


def test_a_failed_upload_says_why_and_is_retried(tmp_path: Path) -> None:
    with mounted_volume(tmp_path) as volume:
        path = volume.path / "file"
        path.write_bytes(b"x" * 5000)
        volume.done("wait", path)
        blocked = volume.remote / "checkpoints"
        aside = volume.remote / "aside"
        blocked.rename(aside)
        blocked.write_text("in the way")  # a folder cannot be made here
        path.write_bytes(b"y" * 5000)
        failing = "CreateCheckpoint"

        def failed() -> bool:
            found = [one for one in volume.ask("jobs") if one["type"] == failing and one["reason"]]
            return bool(found)

        until(failed, "the queue does not say why")
        blocked.unlink()
        aside.rename(blocked)
        [job] = [one for one in lines(volume, "jobs", "list") if one["type"] == failing and one["reason"]]
        volume.done("jobs", "retry", job["job"], "--wait")
        assert volume.done("jobs", "retry", "--all") == "nothing to do\n"
        assert volume.aof2("jobs", "retry").returncode == 2
        volume.done("wait", path)
        assert path.read_bytes() == b"y" * 5000


# -- changes ---------------------------------------------------------------------------------------------------------


def test_a_cursor_sees_each_change_once(volume: MountedVolume) -> None:
    assert lines(volume, "changes", "default", "--cursor", "one") == []
    path = volume.path / "watched"
    written(volume, path, b"watched bytes")
    peeked = lines(volume, "changes", "default", "--cursor", "one", "--peek")
    chunks = [one for one in peeked if one["op"] == "UpsertChunk"]
    assert {one["path"] for one in chunks} == {"watched"} and chunks[-1]["key"]
    assert any(one["op"] == "SetWatermark" for one in peeked)
    sequences = [int(str(one["sequence"])) for one in peeked]
    assert sequences == sorted(sequences)
    assert lines(volume, "changes", "default", "--cursor", "one") == peeked
    assert lines(volume, "changes", "default", "--cursor", "one") == []
    [cursor] = [one for one in volume.ask("cursors", tenant="default") if one["cursor"] == "one"]
    assert cursor["acknowledged"] == sequences[-1]
    volume.done("changes", "default", "--cursor", "one", "--forget")
    assert not [
        one for one in lines(volume, "changes", "--cursors") if one["cursor"] == "one" and one["tenant"] == "default"
    ]


def test_acknowledged_apart_from_showing(volume: MountedVolume) -> None:
    volume.ask("changes", cursor="two")
    for name in ("a", "b"):
        written(volume, volume.path / name, name.encode() * 10)
    shown = lines(volume, "changes", "default", "--cursor", "two", "--peek")
    middle = int(str(shown[0]["sequence"]))
    volume.done("changes", "default", "--cursor", "two", "--ack", middle)
    rest = lines(volume, "changes", "default", "--cursor", "two")
    assert rest == [one for one in shown if int(str(one["sequence"])) > middle]
    assert volume.aof2("changes", "--cursor", "two", "--ack", 5).returncode == 2
    refused(volume, "changes", "--cursor", "not a name", says="a cursor's name is")
    asked(volume, "cursors", "no such cursor", forget="three")
    volume.ask("cursors", forget="two")


def test_following(volume: MountedVolume) -> None:
    volume.ask("changes", cursor="tail", tenant="default")
    command = [AOF2, "changes", "default", "--cursor", "tail", "--follow", "--json", "--conf", str(volume.conf)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        try:
            for name in ("first", "second"):
                written(volume, volume.path / f"followed-{name}", name.encode())
                while json.loads(follower.stdout.readline()).get("path") != f"followed-{name}":
                    pass
            follower.send_signal(signal.SIGINT)
            assert follower.wait(20) == 130
        finally:
            follower.kill()
    volume.ask("cursors", forget="tail")


# -- snapshots -------------------------------------------------------------------------------------------------------


def test_a_snapshot_keeps_what_there_was(volume: MountedVolume) -> None:
    """Three generations are kept here, and a deleted file for a week: a snapshot keeps what is older, too."""
    folder = volume.path / "snapped"
    folder.mkdir()
    often, dropped = folder / "often", folder / "dropped"
    written(volume, often, b"never", b"as it was")
    written(volume, dropped, b"dropped later")
    (folder / "link").symlink_to("often")
    [taken] = lines(volume, "snapshot", "create", "default", "--name", "before")
    assert taken["complete"] and taken["name"] == "before"
    assert lines(volume, "snapshot", "list") == [taken]
    listing = [json.loads(line) for line in (volume.remote / str(taken["key"])).read_text().splitlines()]
    assert listing[0]["snapshot_id"] == taken["snapshot_id"]
    by_path = {entry["path"]: entry for entry in listing[1:]}
    assert by_path["snapped/often"]["generation"] == 2 and by_path["snapped/often"]["size"] == 9
    assert by_path["snapped/dropped"]["size"] == 13 and by_path["snapped/link"]["target"] == "often"
    assert taken["files"] == sum("generation" in entry for entry in listing[1:])
    written(volume, often, *(b"later %d" % i for i in range(6)))
    dropped.unlink()
    until(lambda: numbers(volume, often) == [8, 7, 6, 2] or not volume.ask("gc"), "it does not keep what it is of")
    volume.ask("revert", path=named(volume, often), generation=2, to="default/snapped/back")
    assert (folder / "back").read_bytes() == b"as it was"
    volume.done("undelete", dropped)
    assert dropped.read_bytes() == b"dropped later"
    volume.done("snapshot", "delete", taken["snapshot"])
    assert lines(volume, "snapshot", "list") == []
    assert not (volume.remote / str(taken["key"])).exists()
    until(lambda: numbers(volume, often) == [8, 7, 6] or not volume.ask("gc"), "what only it kept stays")
    asked(volume, "snapshot", "no such snapshot", action="delete", snapshot=taken["snapshot"])
    asked(volume, "snapshot", "TENANT/NUMBER", action="delete", snapshot="7")
