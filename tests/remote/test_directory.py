"""The directory remote: errors of the disk, its own files, and power lost at every point of a put."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from aof2.engine.env import Env, Files
from aof2.engine.errors import FatalIOError
from aof2.engine.remote import directory as module
from aof2.engine.remote.errors import (
    FencedError,
    RemoteAuthError,
    RemoteCorruptError,
    RemoteRefusedError,
    RemoteUnavailableError,
)
from aof2.engine.remote.open import open_remote
from aof2.engine.remote.store import RemoteStore
from aof2.engine.settings.remote import RemoteSettings
from aof2.native import crc64
from tests.remote.conftest import OpenStore
from tests.remote.helpers import MIB, data_of, get, keys_of, put
from tests.support.crash import Acks, PowerLoss, ShadowFiles, crash_cases, hits_of, run_until_crash


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "remote"


@pytest.fixture
def store(open_directory: OpenStore) -> RemoteStore:
    return open_directory(sleep_s=lambda s: None)


def files_of(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


def test_an_object_is_a_file_of_its_bytes(store: RemoteStore, root: Path) -> None:
    put(store, "a/b/c.blob", b"bytes")
    assert (root / "a/b/c.blob").read_bytes() == b"bytes"
    assert files_of(root) == [".aof2-meta/a/b/c.blob.json", "a/b/c.blob"]
    store.delete(["a/b/c.blob"])
    assert files_of(root) == []


def test_a_copied_volume_is_the_same_volume(store: RemoteStore, root: Path, tmp_path: Path) -> None:
    store.put_if_absent("a/b", b"bytes", {"x": "1"})
    etag = store.replace_if_match("v", b"1", None)
    subprocess.run(["cp", "-a", root, tmp_path / "copy"], check=True)
    copy = open_remote(Env(), RemoteSettings(f"file://{tmp_path}/copy"))
    assert copy.head_blob("a/b") == store.head_blob("a/b")
    assert copy.replace_if_match("v", b"2", etag)
    copy.close()


def test_without_its_note_an_object_is_read_to_know_it(store: RemoteStore, root: Path) -> None:
    store.put_if_absent("k", b"bytes", {"x": "1"})
    with_note = store.head_blob("k")
    assert with_note is not None
    shutil.rmtree(root / ".aof2-meta")
    bare = store.head_blob("k")
    assert bare is not None
    assert (bare.crc64, bare.etag, bare.metadata) == (crc64(b"bytes"), with_note.etag, {})
    store.put_if_absent("k", b"bytes", {"x": "1"})
    assert store.head_blob("k") == with_note
    (root / ".aof2-meta/k.json").write_text("not json")
    assert get(store, "k") == b"bytes"


def test_rotten_bytes_are_not_served(store: RemoteStore, root: Path) -> None:
    put(store, "k", data_of(3 * MIB))
    before = (root / "k").stat()
    with open(root / "k", "r+b") as f:
        f.seek(2 * MIB)
        f.write(b"rot")
    os.utime(root / "k", ns=(before.st_mtime_ns, before.st_mtime_ns))
    with pytest.raises(RemoteCorruptError, match="read twice"):
        store.get_blob("k")
    put(store, "other", b"1")
    with pytest.raises(Exception, match="changed"):
        store.compose("whole", ["k", "other"])
    assert store.head_blob("whole") is None


def test_a_put_that_is_overtaken_leaves_no_note_of_its_own(open_directory: OpenStore, root: Path) -> None:
    """Another one replaces the object before this one notes what it put, and notes its own only after it."""
    envs = Env(), Env()
    overtaken, other = (open_directory(env=env) for env in envs)
    named, noted = threading.Event(), threading.Event()

    def wait_for_the_first(name: str) -> None:
        if name == "remote.dir.named":
            named.set()
            assert noted.wait(10)

    def wait_for_the_second(name: str) -> None:
        if name == "remote.dir.named":
            thread.start()
            assert named.wait(10)

    thread = threading.Thread(target=put, args=(other, "followers/a", b"second"))
    envs[0].failpoint = wait_for_the_second  # type: ignore[method-assign]
    envs[1].failpoint = wait_for_the_first  # type: ignore[method-assign]
    put(overtaken, "followers/a", b"first!")
    noted.set()
    thread.join()
    for store in (overtaken, other):
        assert store.get_blob("followers/a")[1] == b"second"


def test_a_file_changed_by_hand_is_not_believed_to_be_the_old_one(store: RemoteStore, root: Path) -> None:
    put(store, "k", b"aaaa")
    (root / "k").write_bytes(b"bbbb")
    head = store.head_blob("k")
    assert head is not None
    assert head.crc64 == crc64(b"bbbb")
    put(store, "k", b"aaaa")
    assert get(store, "k") == b"aaaa"


def test_links_lead_nowhere(store: RemoteStore, root: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_bytes(b"secret")
    put(store, "d/x", b"1")
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "d/file").symlink_to(tmp_path / "outside/secret")
    os.mkfifo(root / "fifo")
    assert store.head_blob("link/secret") is None
    assert store.head_blob("fifo") is None
    with pytest.raises(RemoteRefusedError):
        store.head_blob("d/file")
    with pytest.raises(RemoteRefusedError):
        put(store, "link/new", b"x")
    assert keys_of(store) == ["d/x"]
    assert sorted(os.listdir(tmp_path / "outside")) == ["secret"]


def test_names_a_disk_cannot_hold(store: RemoteStore) -> None:
    put(store, "a/b", b"x")
    for key in ("k" * 300, "a/b/c", "a"):
        with pytest.raises(RemoteRefusedError):
            put(store, key, b"x")
    assert store.head_blob("a/b/c") is None
    assert keys_of(store) == ["a/b"]


class FailingFiles(Files):
    """Fails one operation with one errno."""

    def __init__(self, operation: str, number: int) -> None:
        self.operation = operation
        self.number = number
        self.calls = 0

    def _maybe(self, operation: str) -> None:
        if operation == self.operation:
            self.calls += 1
            raise OSError(self.number, os.strerror(self.number))

    def create(self, path: Path, mode: int = 0o600) -> int:
        self._maybe("create")
        return super().create(path, mode)

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        self._maybe("pwrite")
        super().pwrite(fd, data, offset)

    def rename(self, old: Path, new: Path) -> None:
        self._maybe("rename")
        super().rename(old, new)


@pytest.mark.parametrize("operation", ["create", "pwrite", "rename"])
@pytest.mark.parametrize(
    ("number", "error", "reason", "calls"),
    [
        (errno.ENOSPC, RemoteUnavailableError, 3, 1),
        (errno.EROFS, RemoteUnavailableError, 3, 1),
        (errno.EACCES, RemoteAuthError, 2, 1),
        (errno.EPERM, RemoteAuthError, 2, 1),
        (errno.EIO, RemoteUnavailableError, 3, 3),
    ],
)
def test_disk_errors(
    open_directory: OpenStore, root: Path, operation: str, number: int, error: type[Exception], reason: int, calls: int
) -> None:
    files = FailingFiles(operation, number)
    store = open_directory(env=Env(files=files), sleep_s=lambda s: None, retries=2)
    with pytest.raises(error, match=os.strerror(number)) as e:
        put(store, "a/k", b"bytes")
    assert e.value.reason_code == reason  # type: ignore[attr-defined]
    assert files.calls == calls
    assert files_of(root) == []
    files.operation = ""
    put(store, "a/k", b"bytes")
    assert get(store, "a/k") == b"bytes"


def test_a_failed_fsync_stores_nothing(open_directory: OpenStore, root: Path) -> None:
    class Broken(Files):
        def fsync(self, fd: int) -> None:
            if not stat.S_ISDIR(os.fstat(fd).st_mode):
                raise FatalIOError("fsync failed")

    store = open_directory(env=Env(files=Broken()))
    with pytest.raises(FatalIOError):
        put(store, "k", b"x")
    assert files_of(root) == []


@pytest.mark.parametrize("replaced", [False, True])
def test_a_root_that_is_gone_is_unavailable_not_empty(store: RemoteStore, root: Path, replaced: bool) -> None:
    put(store, "k", b"x")
    root.rename(root.with_name("elsewhere"))
    if replaced:
        root.mkdir()  # what is left of a mount point when its disk is gone
    for call in (
        lambda: store.head_blob("k"),
        lambda: list(store.list()),
        lambda: store.get_range("k", 0, 1),
        lambda: store.put_blob("new", b"x", 1),
        lambda: store.delete(["k"]),
    ):
        with pytest.raises(RemoteUnavailableError, match="mounted" if replaced else "No such file") as e:
            call()
        assert e.value.reason_code == 3
    assert root.exists() == replaced
    assert not replaced or os.listdir(root) == []


def test_folders_go_with_their_last_object(store: RemoteStore, root: Path) -> None:
    put(store, "a/b/1", b"x")
    put(store, "a/b/2", b"x")
    store.delete(["a/b/1"])
    assert keys_of(store) == ["a/b/2"]
    store.delete(["a/b/2"])
    assert os.listdir(root) == []


def test_puts_and_deletes_in_one_folder_do_not_meet(store: RemoteStore) -> None:
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(40):
                put(store, f"deep/er/{number}", b"x")
                store.delete([f"deep/er/{number}"])
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failed == []
    assert keys_of(store) == []


def test_a_root_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RemoteRefusedError):
        open_remote(Env(), RemoteSettings(f"file://{tmp_path}/file/below"))


def test_temps_of_crashed_puts_are_cleared_away(store: RemoteStore, root: Path) -> None:
    put(store, "a/k", b"x")
    (root / "a/.aof2-tmp-1-2").write_bytes(b"half")
    (root / ".aof2-meta/a/.aof2-tmp-1-3").write_bytes(b"half")
    assert keys_of(store) == ["a/k"]
    assert store.abort_stale_uploads(3600) == 0
    assert store.abort_stale_uploads(-1) == 2
    assert files_of(root) == [".aof2-meta/a/k.json", "a/k"]


# Power loss

OLD, NEW = data_of(9000, seed=1), data_of(9000, seed=2)


@pytest.fixture
def journalled_link(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """link(2) goes into the journal of whoever links, as a name for the inode."""
    real = os.link
    current: list[ShadowFiles] = []
    opened = ShadowFiles.__init__

    def remember(self: ShadowFiles, root: Path, shadow: Path) -> None:
        opened(self, root, shadow)
        current.append(self)

    def link(old: Path, new: Path) -> None:
        real(old, new)
        for files in current:
            if new.is_relative_to(files.root):
                files._log(op="create", name=files._name(new), ino=files._keep(new))

    monkeypatch.setattr(ShadowFiles, "__init__", remember)
    monkeypatch.setattr(module, "link", link)
    yield


def workload(env: Env, acks: Acks) -> None:
    """Every kind of put, twice, with other bytes where they may change."""
    folder: Path = env.files.root  # type: ignore[attr-defined]
    store = open_remote(env, RemoteSettings(f"file://{folder}"))
    for data in (OLD, NEW):
        store.put_blob("blobs/x/k", data, len(data))
        acks.tell(["put", data == NEW])
    etag = None
    for data in (OLD, NEW):
        etag = store.replace_if_match("volume.json", data, etag)
        acks.tell(["replace", data == NEW])
    store.put_if_absent("manifest/0", OLD)
    acks.tell(["absent"])


CASES = [None, *module.CRASH_POINTS]


@pytest.mark.parametrize("point", CASES, ids=str)
def test_power_loss_leaves_old_or_new(tmp_path: Path, journalled_link: None, point: str | None) -> None:
    hits = hits_of(workload, tmp_path / "count")
    cases = [(None, 1)] if point is None else list(crash_cases(hits, (point,)))
    for number, (name, nth) in enumerate(cases):
        crash = run_until_crash(workload, tmp_path / f"run{number}", name, nth)
        acked = [tuple(a) for a in crash.acks]  # type: ignore[arg-type]
        disks = [crash.root]
        loss = PowerLoss(crash)
        disks += [loss.disk(tmp_path / f"disk{number}-{seed}", random.Random(seed)) for seed in range(6)]
        for disk in disks:
            check(disk, acked)


def check(disk: Path, acked: list[tuple[object, ...]]) -> None:
    """Acknowledged bytes are there, others are whole or absent, and the store goes on."""
    store = open_remote(Env(), RemoteSettings(f"file://{disk}"))
    found: dict[str, bytes | None] = {}
    for key in ("blobs/x/k", "volume.json", "manifest/0"):
        info = store.head_blob(key)
        found[key] = get(store, key) if info else None
        assert found[key] in (None, OLD, NEW)
        assert info is None or info.crc64 == crc64(found[key] or b"")
    for key, kind in (("blobs/x/k", "put"), ("volume.json", "replace")):
        if (kind, True) in acked:
            assert found[key] == NEW
        elif (kind, False) in acked:
            assert found[key] is not None
    if ("absent",) in acked:
        assert found["manifest/0"] == OLD
    assert set(keys_of(store)) == {key for key, data in found.items() if data is not None}
    put(store, "blobs/x/k", NEW)
    store.put_if_absent("manifest/0", OLD)
    with pytest.raises(FencedError):
        store.put_if_absent("manifest/0", NEW)
    info = store.head_blob("volume.json")
    store.replace_if_match("volume.json", NEW, info.etag if info else None)
    store.abort_stale_uploads(-1)
    for key, data in (("blobs/x/k", NEW), ("volume.json", NEW), ("manifest/0", OLD)):
        assert get(store, key) == data
    names = ["blobs/x/k", "manifest/0", "volume.json"]
    assert files_of(disk) == sorted([".aof2-lock", *names, *(f".aof2-meta/{name}.json" for name in names)])
    store.close()
