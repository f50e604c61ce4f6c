"""`aof2 restore`, and `aof2 manifest …` on the tenants of a volume: what a remote can lose is found and named."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import msgspec
import pytest
import trio

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import INO_STREAM_SHIFT, ROOT_INO
from aof2.engine.settings import Settings
from aof2.engine.volume import Volume
from tests.cli.logs import KEYS, objects, run
from tests.cli.test_command import AOF2
from tests.engine.helpers import KIB, put_object, read_object, run_volume, small_settings
from tests.verify.build import flip

TENANT = 1
SIZES = {b"empty": 0, b"one": 1, b"small": 5000, b"two-chunks": 300 * KIB, b"later": 77}
CONF = """
[volume]
mountpoint = "mnt"
state_dir = "{state}"
[remote]
url = "file://remote"
[cache]
hot_bytes = "64MiB"
[manifest]
chunk_capacity = "16KiB"
[metrics]
listen = ""
[tenants.default]
kind = "files"
"""


def content(name: bytes) -> bytes:
    return random.Random(name).randbytes(SIZES[name])


def write_conf(root: Path, state: str = "state") -> Path:
    path = root / f"{state}.conf"
    path.write_text(CONF.format(state=state))
    return path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A volume that was closed cleanly, with everything it has on the remote. Copied, never used itself."""
    root = tmp_path_factory.mktemp("built")

    def session(*names: bytes) -> None:
        async def body(volume: Volume) -> None:
            for name in names:
                await put_object(volume, "default", name, content(name))
            await volume.checkpoint("default")

        run_volume(small_settings(root), body)

    *first, later = SIZES
    session(*first)
    session(later)  # a close seals what there is of the log: more than one chunk
    return root


@pytest.fixture
def root(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("AOF2_CONF", raising=False)
    shutil.copytree(built, tmp_path / "volume", symlinks=True)
    return tmp_path / "volume"


@pytest.fixture
def conf(root: Path) -> Path:
    return write_conf(root)


def log_objects(root: Path, stream_id: int = TENANT) -> list[Path]:
    """The chunks that the remote has of a log, first to last."""
    return sorted((root / "remote" / "manifest" / str(stream_id)).glob("*.mlog"), key=lambda path: int(path.stem))


def damage_in(stderr: str) -> list[str]:
    """The lines that are no notes and no progress. (How many chunks and snapshots a log has depends on the clock.)"""
    lines = stderr.splitlines()
    return [line for line in lines if not line.startswith(("aof2: note: ", "restore: ", "chunks of "))]


def restored_settings(root: Path) -> Settings:
    made = small_settings(root)
    volume = msgspec.structs.replace(made.volume, state_dir=root / "again")
    return msgspec.structs.replace(made, volume=volume)


def look_up(volume: Volume, name: bytes) -> tuple[int, int, int] | None:
    with volume.catalog.view() as view:
        entry = view.get(TENANT, t.DENTRIES, (TENANT << INO_STREAM_SHIFT | ROOT_INO, name))
        inode = view.get(TENANT, t.INODES, entry.ino) if entry else None
    return (TENANT, inode.ino, inode.generation) if inode else None


# -- manifest inspect --------------------------------------------------------------------------------------------


def test_inspect_by_tenant_is_inspect_of_its_folder(root: Path, conf: Path) -> None:
    by_name = run("manifest", "inspect", "default", "--conf", conf, "--json")
    assert (by_name.exit_code, by_name.stderr) == (0, "")
    by_folder = run("manifest", "inspect", root / "state/manifest/1", "--json")
    assert by_name.stdout == by_folder.stdout
    rows = objects(by_name)
    assert all(tuple(row) == KEYS for row in rows)
    assert "UploadDone" in {row["type"] for row in rows}


def test_inspect_finds_the_tenant_without_a_catalog(root: Path, conf: Path) -> None:
    before = run("manifest", "inspect", "default", "--conf", conf)
    (root / "state/catalog/trust.json").unlink()
    after = run("manifest", "inspect", "default", "--conf", conf)
    assert (after.exit_code, after.stdout, after.stderr) == (0, before.stdout, "")


def test_inspect_marks_what_differs(root: Path, conf: Path) -> None:
    before = run("manifest", "inspect", "default", "--conf", conf, "--json").stdout
    damaged = log_objects(root)[0]
    flip(damaged, damaged.stat().st_size - 1)
    with damaged.open("ab") as f:
        f.write(b"more")
    result = run("manifest", "inspect", "default", "--conf", conf, "--json")
    assert (result.exit_code, result.stdout) == (0, before)
    (note,) = result.stderr.splitlines()
    assert note.startswith(f"aof2: note: chunk {damaged.stem} differs from its remote copy")


def test_inspect_with_the_remote_away(root: Path, conf: Path) -> None:
    before = run("manifest", "inspect", "default", "--conf", conf).stdout
    (root / "remote").rename(root / "away")
    result = run("manifest", "inspect", "default", "--conf", conf)
    assert (result.exit_code, result.stdout) == (0, before)
    (note,) = result.stderr.splitlines()
    assert note.startswith("aof2: note: default: not compared with its remote copy: the remote is away")


def test_names_that_are_nothing(root: Path, conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for verb in ("inspect", "verify"):
        for arguments, says in (
            (("nobody", "--conf", conf), "no tenant of the volume; its tenants: default"),
            (("nobody", "--conf", tmp_path / "none.conf"), "no such file"),
            (("nobody", "--conf", write_conf(root, "elsewhere")), "no volume here"),
            (("Not/A/Tenant", "--conf", conf), "no such directory"),
        ):
            result = run("manifest", verb, *arguments)
            assert (result.exit_code, result.stdout) == (1, "")
            (line,) = result.stderr.splitlines()
            assert says in line


# -- manifest verify ---------------------------------------------------------------------------------------------


def test_verify_a_clean_volume(root: Path, conf: Path) -> None:
    whole = run("manifest", "verify", "--conf", conf, "--json")
    assert (whole.exit_code, damage_in(whole.stderr)) == (0, [])
    report = json.loads(whole.stdout)
    assert report["clean"] is True
    assert [(s["stream_id"], s["tenant"], s["remote"]) for s in report["streams"]] == [
        (0, "", "compared"),
        (1, "default", "compared"),
    ]
    assert all(s["clean"] and s["remote_objects"] and not s["damage"] for s in report["streams"])
    one = run("manifest", "verify", "default", "--conf", conf)
    assert (one.exit_code, damage_in(one.stderr)) == (0, [])
    assert "tenant\tdefault\n" in one.stdout
    assert "verdict\tclean\n" in one.stdout
    plain = run("manifest", "verify", "--remote", "--conf", conf)
    assert [line.split("\t")[:3] for line in plain.stdout.splitlines()[1:]] == [
        ["0", "-", "clean"],
        ["1", "default", "clean"],
    ]


def test_verify_without_an_argument(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(write_conf(root), root / "mount.conf")
    monkeypatch.chdir(root)
    assert len(json.loads(run("manifest", "verify", "--json").stdout)["streams"]) == 2
    monkeypatch.chdir(root / "state/manifest/1")
    monkeypatch.setattr("aof2.engine.settings.loader.CONF_SYSTEM", root / "none.conf")
    assert "folder\t.\n" in run("manifest", "verify").stdout


@pytest.mark.parametrize("stream_id", [0, TENANT])
def test_verify_names_what_the_remote_lost(root: Path, conf: Path, stream_id: int) -> None:
    gone = log_objects(root, stream_id)[-1]
    gone.unlink()
    result = run("manifest", "verify", "--conf", conf)
    assert result.exit_code == 1
    (line,) = damage_in(result.stderr)
    assert f"manifest/{stream_id}/{gone.name} is missing in the remote though the log says it was uploaded" in line
    report = json.loads(run("manifest", "verify", "--conf", conf, "--json").stdout)
    assert [s["clean"] for s in report["streams"]] == [stream_id != 0, stream_id != TENANT]
    assert report["streams"][stream_id]["findings"][0]["status"] in ("missing", "needs_repair")


def test_verify_names_what_differs(root: Path, conf: Path) -> None:
    damaged = log_objects(root)[-1]
    with damaged.open("ab") as f:
        f.write(b"more")
    result = run("manifest", "verify", "default", "--conf", conf)
    assert result.exit_code == 1
    assert "verdict\tdamaged (1 finding(s))\n" in result.stdout
    (line,) = damage_in(result.stderr)
    assert f"chunk {damaged.stem} differs from its remote copy" in line


@pytest.mark.parametrize("how", ["noticed", "silent"])
def test_verify_reads_the_remote_when_asked(root: Path, conf: Path, how: str) -> None:
    damaged = log_objects(root)[0]
    if how == "silent":
        flip(damaged, 200)  # size and times as they were: only reading it shows
    else:
        data = bytearray(damaged.read_bytes())
        data[200] ^= 1
        damaged.write_bytes(data)
    result = run("manifest", "verify", "--remote", "--conf", conf)
    assert result.exit_code == 1
    (line,) = damage_in(result.stderr)
    assert line.startswith(f"aof2: default: chunk {damaged.stem} differs from its remote copy")
    assert run("manifest", "verify", "default", "--conf", conf).exit_code == (how == "noticed")


def test_verify_with_the_remote_away_is_a_note(root: Path, conf: Path) -> None:
    (root / "remote").rename(root / "away")
    result = run("manifest", "verify", "--conf", conf)
    assert result.exit_code == 0
    assert damage_in(result.stderr) == []
    for label in ("stream 0", "default"):
        assert f"aof2: note: {label}: not compared with its remote copy: the remote is away: " in result.stderr
    assert not (root / "remote").exists()


def test_verify_sees_local_damage_of_a_tenant(root: Path, conf: Path) -> None:
    chunk = max((root / "state/manifest/1").glob("*.mlog"), key=lambda path: int(path.stem))
    flip(chunk, 0)
    result = run("manifest", "verify", "default", "--conf", conf)
    assert result.exit_code == 1
    assert chunk.name in result.stderr
    assert all(line.startswith("aof2: ") for line in result.stderr.splitlines())


def test_a_volume_in_use(root: Path, conf: Path) -> None:
    async def body(volume: Volume) -> None:
        for i in range(20):
            await put_object(volume, "default", b"more-%d" % i, b"more")
        for arguments in (("verify",), ("verify", "default"), ("inspect", "default")):
            command = [AOF2, "manifest", *arguments, "--conf", conf, "--json"]
            result = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
            assert result.returncode == 0, result.stderr
            assert damage_in(result.stderr.decode()) == []

    run_volume(small_settings(root), body)


# -- restore -----------------------------------------------------------------------------------------------------


def test_restore_brings_everything_back(root: Path) -> None:
    conf = write_conf(root, "again")
    result = run("restore", "--from", (root / "remote").as_uri(), "--conf", conf)
    assert result.exit_code == 0, result.output
    assert "verdict\tcomplete\n" in result.stdout
    assert "tenants\tdefault\n" in result.stdout
    assert damage_in(result.stderr) == []
    assert run("manifest", "verify", "--conf", conf).exit_code == 0
    shutil.rmtree(root / "state")

    async def body(volume: Volume) -> None:
        for name, size in SIZES.items():
            key = look_up(volume, name)
            assert key is not None
            assert await read_object(volume, key, 0, size + 1) == content(name)

    run_volume(restored_settings(root), body)


def test_restore_as_json(root: Path) -> None:
    result = run("restore", "--from", (root / "remote").as_uri(), "--conf", write_conf(root, "again"), "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["complete"], report["gaps"], report["lost"]) == (0, True, [], [])
    assert report["tenants"] == ["default"]
    assert report["state_dir"] == str(root / "again")


def test_restore_refuses_what_is_taken(root: Path, conf: Path) -> None:
    before = sorted(root.rglob("*"))
    result = run("restore", "--from", (root / "remote").as_uri(), "--conf", conf)
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert "state is not empty" in line
    assert sorted(root.rglob("*")) == before


def test_restore_from_nowhere(root: Path) -> None:
    conf = write_conf(root, "again")
    (root / "bare").mkdir()
    for url, says in (
        ("ftp://there", "unknown scheme"),
        ("file://remote", "the path must be absolute"),
        ((root / "none").as_uri(), "no such directory"),
        ((root / "bare").as_uri(), "holds no volume"),
        (root.as_uri(), "overlap"),
    ):
        result = run("restore", "--from", url, "--conf", conf)
        assert (result.exit_code, result.stdout) == (1, "")
        (line,) = damage_in(result.stderr)
        assert says in line
        assert not (root / "again").exists()
    assert not (root / "none").exists()
    assert run("restore", "--conf", conf).exit_code == 2


def test_restore_lists_a_missing_blob(root: Path) -> None:
    blob = max((root / "remote/checkpoints").rglob("*.blob"), key=lambda path: path.stat().st_size)
    blob.unlink()
    conf = write_conf(root, "again")
    result = run("restore", "--from", (root / "remote").as_uri(), "--conf", conf)
    assert result.exit_code == 1
    assert "could not be found" in result.stdout
    (line,) = damage_in(result.stderr)
    assert line.startswith("aof2: not found: default/two-chunks, ")
    assert blob.name in line
    shutil.rmtree(root / "state")

    async def body(volume: Volume) -> None:
        key = look_up(volume, b"small")
        assert key is not None
        assert await read_object(volume, key, 0, SIZES[b"small"]) == content(b"small")

    run_volume(restored_settings(root), body)


def test_restore_lists_what_was_never_uploaded(root: Path) -> None:
    async def body(volume: Volume) -> None:
        await put_object(volume, "default", b"late", b"late")

    run_volume(small_settings(root), body, parts=("replicator",))
    result = run("restore", "--from", (root / "remote").as_uri(), "--conf", write_conf(root, "again"))
    assert result.exit_code == 1
    (line,) = damage_in(result.stderr)
    assert line.startswith("aof2: not found: default/late, generation 1, 4B: it was never uploaded; ")


def test_restore_of_a_tenant_whose_log_is_not_there(root: Path) -> None:
    shutil.rmtree(root / "remote/manifest/1")
    conf = write_conf(root, "again")
    result = run("restore", "--from", (root / "remote").as_uri(), "--conf", conf)
    assert result.exit_code == 1
    (line,) = damage_in(result.stderr)
    assert line == "aof2: not found: tenant default: nothing of its log was uploaded; it comes back empty"
    shutil.rmtree(root / "state")
    found = run("manifest", "verify", "--conf", conf)
    assert found.exit_code == 1
    assert "default has no log here" in found.stderr


def test_restore_lists_gaps(root: Path) -> None:
    for path in (root / "remote/manifest/1").glob("snapshot_*"):
        path.unlink()
    log_objects(root)[0].unlink()
    result = run("restore", "--from", (root / "remote").as_uri(), "--conf", write_conf(root, "again"), "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["complete"]) == (1, False)
    assert report["gaps"]
    assert report["gaps"][0].startswith("stream 1: ")


def test_restore_says_where_the_conf_points_elsewhere(root: Path) -> None:
    (root / "remote").rename(root / "moved")
    (root / "remote").mkdir()
    url = (root / "moved").as_uri()
    result = run("restore", "--from", url, "--conf", write_conf(root, "again"))
    assert result.exit_code == 0, result.output
    assert f"set it to {url}" in result.stderr
