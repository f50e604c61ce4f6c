"""What every remote promises, whatever is behind it: the same tests over S3 and a directory."""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from pathlib import Path

import pytest

from aof2.engine.errors import CorruptError
from aof2.engine.remote.directory import DirectoryStore
from aof2.engine.remote.errors import FencedError, RemoteCorruptError, RemoteMissingError, RemoteUnavailableError
from aof2.engine.remote.source import ChunksSource, FileSource
from aof2.engine.remote.store import RemoteStore
from aof2.native import crc64
from tests.remote.conftest import OpenStore
from tests.remote.helpers import MIB, data_of, get, keys_of, put

SIZES = [0, 1, 4 * MIB, 5 * MIB - 1, 5 * MIB + 1, 16 * MIB, 40 * MIB + 3]


@pytest.mark.parametrize("size", SIZES)
def test_what_is_put_is_got(store: RemoteStore, size: int) -> None:
    data = data_of(size)
    sha = hashlib.sha256(data).digest()
    etag = store.put_blob("a/blob", data, size, crc64=crc64(data), sha256=sha)
    info, got = store.get_blob("a/blob")
    assert got == data
    head = store.head_blob("a/blob")
    assert head is not None
    assert (head.key, head.size, head.etag, head.crc64, head.sha256) == ("a/blob", size, etag, crc64(data), sha)
    assert (info.size, info.etag, info.metadata) == (size, etag, head.metadata)
    assert abs(head.modified_ms - os.stat("/proc/self").st_mtime * 1000) < 86_400_000


@pytest.mark.parametrize("size", [0, 70_000, 17 * MIB])
def test_every_kind_of_source(store: RemoteStore, tmp_path: Path, size: int) -> None:
    data = data_of(size, seed=2)
    path = tmp_path / "source"
    path.write_bytes(b"before" + data + b"after")

    def chunks() -> list[bytes]:
        return [data[i : i + 999_983] for i in range(0, size, 999_983)] + [b""]

    sources = {"bytes": data, "file": FileSource(path, 6), "chunks": ChunksSource(chunks), "view": memoryview(data)}
    for name, source in sources.items():
        store.put_blob(name, source, size)
        assert get(store, name) == data
    if size:
        with mmap.mmap(-1, size) as mapped:
            mapped[:] = data
            store.put_blob("mmap", mapped, size)
        assert get(store, "mmap") == data


def test_a_source_that_ends_early_stores_nothing(store: RemoteStore, tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(data_of(17 * MIB))
    for source in (FileSource(path), ChunksSource(lambda: [b"1", b"2"]), b"12"):
        with pytest.raises(CorruptError):
            store.put_blob("short", source, 18 * MIB, crc64=1)
    with pytest.raises(CorruptError, match="more than"):
        store.put_blob("short", ChunksSource(lambda: [b"1", b"2"]), 1, crc64=crc64(b"1"))
    assert store.head_blob("short") is None


@pytest.mark.parametrize("size", [10, 17 * MIB])
def test_bytes_that_are_not_those_announced_store_nothing(store: RemoteStore, size: int) -> None:
    data = data_of(size)
    with pytest.raises(CorruptError, match="changed"):
        store.put_blob("wrong", data, size, crc64=crc64(data) ^ 1)
    with pytest.raises(CorruptError, match="changed"):
        store.put_blob("wrong", data, size, sha256=bytes(32))
    assert store.head_blob("wrong") is None
    assert keys_of(store) == []


def test_ranges(store: RemoteStore) -> None:
    data = data_of(13 * MIB + 5)
    put(store, "r", data)
    spans = [(0, 1), (0, 0), (len(data) - 1, 1), (MIB - 1, 2), (3 * MIB, 9 * MIB), (0, len(data)), (len(data), 0)]
    for offset, length in spans:
        assert store.get_range("r", offset, length) == data[offset : offset + length]
    for offset, length in [(len(data), 1), (len(data) - 1, 2), (len(data) + 10, 5), (0, len(data) + 1)]:
        with pytest.raises(RemoteCorruptError):
            store.get_range("r", offset, length)
    with pytest.raises(ValueError, match="range"):
        store.get_range("r", -1, 2)


def test_missing_objects(store: RemoteStore) -> None:
    assert store.head_blob("no/such") is None
    with pytest.raises(RemoteMissingError) as e:
        store.get_blob("no/such")
    assert e.value.reason_code == 4
    with pytest.raises(RemoteMissingError):
        store.get_range("no/such", 0, 1)
    store.delete(["no/such", "nor/this"])
    store.delete([])
    assert keys_of(store, "no/") == []


def test_list_is_in_byte_order_and_pages(store: RemoteStore) -> None:
    keys = sorted(
        ["a-b", "a.b", "a/b", "a/b-c/d", "a/b/c", "a0", "b/1", "b/10", "b/2", "B", "é/x", "z" * 200]
        + [f"many/{i:04}" for i in range(40)],
        key=str.encode,
    )
    keys.remove("a/b")  # a folder cannot be an object at the same time, nor need it
    for key in reversed(keys):
        put(store, key, key.encode())
    listed = keys_of(store)
    assert sorted(listed, key=str.encode) == keys
    if isinstance(store, DirectoryStore):
        assert listed == keys
        assert keys_of(store, "a/") == ["a/b-c/d", "a/b/c"]
    assert sorted(keys_of(store, "a/b")) == ["a/b-c/d", "a/b/c"]
    assert keys_of(store, "b/1") == ["b/1", "b/10"]
    assert keys_of(store, "many/") == [f"many/{i:04}" for i in range(40)]
    assert [i.size for i in store.list("b/")] == [3, 4, 3]


def test_delete(store: RemoteStore) -> None:
    for i in range(5):
        put(store, f"d/{i}", b"x")
    store.delete(f"d/{i}" for i in range(0, 7, 2))
    assert keys_of(store) == ["d/1", "d/3"]
    put(store, "d/2", b"other")
    assert get(store, "d/2") == b"other"


def test_a_second_put_of_the_same_bytes_moves_none(store: RemoteStore) -> None:
    data = data_of(17 * MIB)
    etag = put(store, "same", data)
    before = store.stats()
    assert put(store, "same", data) == etag
    after = store.stats()
    assert after.bytes_sent == before.bytes_sent
    assert after.puts_skipped == before.puts_skipped + 1
    assert after.requests == before.requests + 1


def test_a_put_of_other_bytes_replaces(store: RemoteStore) -> None:
    put(store, "k", b"one")
    put(store, "k", b"two")
    assert get(store, "k") == b"two"


def test_put_if_absent(store: RemoteStore) -> None:
    etag = store.put_if_absent("m/0", b"mine", {"Record_Count": "3"})
    assert store.put_if_absent("m/0", b"mine", {"record_count": "3"}) == etag
    for other in (b"yours", b"min", b""):
        with pytest.raises(FencedError):
            store.put_if_absent("m/0", other)
    assert get(store, "m/0") == b"mine"
    head = store.head_blob("m/0")
    assert head is not None
    assert head.metadata == {"record_count": "3"}


def test_replace_if_match(store: RemoteStore) -> None:
    first = store.replace_if_match("v", b"1", None)
    assert store.replace_if_match("v", b"1", None) == first
    with pytest.raises(FencedError):
        store.replace_if_match("v", b"other", None)
    second = store.replace_if_match("v", b"2", first)
    assert second != first
    with pytest.raises(FencedError):
        store.replace_if_match("v", b"3", first)
    assert get(store, "v") == b"2"
    info = store.head_blob("v")
    assert info is not None
    assert info.etag == second
    with pytest.raises(FencedError):
        store.replace_if_match("none", b"3", first)
    assert store.head_blob("none") is None


def test_of_many_replacements_one_wins(open_store: OpenStore) -> None:
    stores = [open_store() for _ in range(4)]
    base = stores[0].replace_if_match("v", b"base", None)
    won: list[int] = []

    def race(number: int) -> None:
        try:
            stores[number].replace_if_match("v", b"%d" % number, base)
        except FencedError:
            return
        won.append(number)

    threads = [threading.Thread(target=race, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(won) == 1
    assert get(stores[1], "v") == b"%d" % won[0]


def test_of_many_puts_if_absent_one_wins(open_store: OpenStore) -> None:
    stores = [open_store() for _ in range(4)]
    won: list[int] = []

    def race(number: int) -> None:
        try:
            stores[number].put_if_absent("m", b"%d" % number)
        except FencedError:
            return
        won.append(number)

    threads = [threading.Thread(target=race, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(won) == 1
    assert get(stores[1], "m") == b"%d" % won[0]


@pytest.mark.parametrize(
    "sizes", [[], [0], [3], [3, 0, 4], [6 * MIB, 100], [5 * MIB, 6 * MIB, 7 * MIB], [6 * MIB, 5, 6 * MIB]], ids=str
)
def test_compose(store: RemoteStore, sizes: list[int]) -> None:
    parts = [data_of(size, seed=i) for i, size in enumerate(sizes)]
    sources = [f"part/{i}" for i in range(len(parts))]
    for source, part in zip(sources, parts, strict=True):
        put(store, source, part)
    etag = store.compose("whole", sources)
    assert get(store, "whole") == b"".join(parts)
    head = store.head_blob("whole")
    assert head is not None
    assert (head.etag, head.crc64, head.size) == (etag, crc64(b"".join(parts)), sum(sizes))
    before = store.stats().bytes_sent
    assert store.compose("whole", sources) == etag
    assert store.stats().bytes_sent == before


def test_compose_of_what_is_not_there(store: RemoteStore) -> None:
    put(store, "p", b"1")
    with pytest.raises(RemoteMissingError):
        store.compose("whole", ["p", "q"])
    assert store.head_blob("whole") is None
    put(store, "whole", b"other")
    with pytest.raises(FencedError):
        store.compose("whole", ["p"])
    for name in ("x", "y"):
        put(store, name, data_of(6 * MIB))
    with pytest.raises(FencedError):
        store.compose("whole", ["x", "y"])
    assert get(store, "whole") == b"other"


HOSTILE = [
    "",
    "/etc/passwd",
    "../x",
    "a/../b",
    "a/..",
    "./a",
    "a//b",
    "a/",
    "a\0b",
    "a\nb",
    "a\\b",
    ".aof2-meta/a",
    "x/.aof2-tmp-1",
]


@pytest.mark.parametrize("key", [*HOSTILE, "k" * 901, "\ud800"], ids=repr)
def test_hostile_keys_are_refused(store: RemoteStore, key: str) -> None:
    calls = [
        lambda: store.put_blob(key, b"x", 1),
        lambda: store.put_if_absent(key, b"x"),
        lambda: store.replace_if_match(key, b"x", None),
        lambda: store.get_blob(key),
        lambda: store.get_range(key, 0, 1),
        lambda: store.head_blob(key),
        lambda: store.delete([key]),
        lambda: store.compose(key, []),
        lambda: store.compose("fine", [key]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="not a remote key"):
            call()


@pytest.mark.parametrize("key", ["ünï/çødé", "a b/c+d&e=f?g#h", "%2e%2e/x", "…", ".hidden", "a:b;c,d'e\"f<g>h|i*"])
def test_odd_keys_are_kept(store: RemoteStore, key: str) -> None:
    put(store, key, key.encode())
    assert get(store, key) == key.encode()
    assert keys_of(store) == [key]
    store.delete([key])
    assert keys_of(store) == []


@pytest.mark.parametrize(
    "metadata", [{"": "x"}, {"a b": "x"}, {"a": "é"}, {"a": "x\n"}, {"aof2-crc64": "1"}, {"a": "x" * 3000}]
)
def test_metadata_that_a_header_cannot_carry(store: RemoteStore, metadata: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="metadata"):
        store.put_if_absent("m", b"x", metadata)


def test_a_closed_store_says_so(store: RemoteStore) -> None:
    put(store, "k", b"x")
    store.close()
    with pytest.raises(RemoteUnavailableError, match="closed"):
        store.head_blob("k")


def test_a_deadline_in_the_past(store: RemoteStore) -> None:
    with pytest.raises(RemoteUnavailableError, match="within"):
        store.get_blob("k", timeout_s=0)


def test_many_threads(store: RemoteStore) -> None:
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(5):
                key, data = f"t/{number}/{i}", data_of(100_000 + i, seed=number)
                put(store, key, data)
                assert get(store, key) == data
                assert store.get_range(key, 5, 10) == data[5:15]
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failed == []
    assert len(keys_of(store, "t/")) == 40
