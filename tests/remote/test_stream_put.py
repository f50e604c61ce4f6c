"""Large objects on their way to a server nearby: one connection, sent as they are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aof2.engine.errors import Aof2Error, CorruptError
from aof2.engine.remote import s3_put
from aof2.engine.remote.source import ChunksSource, FileSource
from aof2.native import crc64
from tests.support.seaweed import Fault, FaultProxy, of

from .conftest import OpenStore
from .helpers import MIB, data_of, get, keys_of, put
from .test_wire import TlsProxy, tls  # noqa: F401

DATA = data_of(17 * MIB + 5)


def in_pieces(data: bytes = DATA) -> ChunksSource:
    return ChunksSource(lambda: (data[at : at + MIB] for at in range(0, len(data), MIB)))


@pytest.fixture(autouse=True)
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is."""
    monkeypatch.setattr(s3_put, "NEAR_S", 60.0)


def test_one_request(open_s3: OpenStore, proxy: FaultProxy, tmp_path: Path) -> None:
    store = open_s3(endpoint_url=proxy.endpoint_url)
    put(store, "small", b"small")
    proxy.seen.clear()
    store.put_blob("k", in_pieces(), len(DATA), crc64=crc64(DATA))
    assert proxy.count("PUT") == 1
    assert proxy.count("POST") == 0
    assert get(store, "k") == DATA
    info = store.head_blob("k")
    assert info is not None
    assert (info.size, info.crc64) == (len(DATA), crc64(DATA))
    (tmp_path / "f").write_bytes(DATA)
    store.put_blob("f", FileSource(tmp_path / "f"), len(DATA), crc64=crc64(DATA))
    assert get(store, "f") == DATA


def test_far_away_it_goes_in_parts(open_s3: OpenStore, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_put, "NEAR_S", 0.0)
    store = open_s3(endpoint_url=proxy.endpoint_url)
    put(store, "small", b"small")
    store.put_blob("k", in_pieces(), len(DATA), crc64=crc64(DATA))
    assert proxy.count("POST") == 2
    assert get(store, "k") == DATA


def test_what_changed_is_no_object(open_s3: OpenStore) -> None:
    store = open_s3()
    put(store, "small", b"small")
    other = bytearray(DATA)
    other[-1] ^= 1
    with pytest.raises(CorruptError, match="changed"):
        store.put_blob("k", in_pieces(bytes(other)), len(DATA), crc64=crc64(DATA))
    with pytest.raises(CorruptError, match="were to be sent"):
        store.put_blob("k", in_pieces(DATA[:-1]), len(DATA), crc64=crc64(DATA))
    assert keys_of(store) == ["small"]


def test_what_ends_early_is_no_object(open_s3: OpenStore) -> None:
    """The second time it is read: it was right when its hash was taken."""
    store = open_s3()
    put(store, "small", b"small")
    passes = 0

    def made() -> Iterator[bytes]:
        nonlocal passes
        passes += 1
        for at in range(0, len(DATA), MIB):
            if passes > 1 and at > 9 * MIB:
                raise CorruptError("not wanted any more")
            yield DATA[at : at + MIB]

    with pytest.raises(CorruptError, match="wanted"):
        store.put_blob("k", ChunksSource(made), len(DATA), crc64=crc64(DATA))
    assert keys_of(store) == ["small"]


@pytest.mark.parametrize(
    "fault", [Fault(of("PUT"), status=503), Fault(of("PUT"), drop=True), Fault(of("PUT"), drop_after=True)]
)
def test_a_failed_one_is_sent_again(open_s3: OpenStore, proxy: FaultProxy, fault: Fault) -> None:
    store = open_s3(endpoint_url=proxy.endpoint_url)
    put(store, "small", b"small")
    proxy.add(fault)
    store.put_blob("k", in_pieces(), len(DATA), crc64=crc64(DATA))
    assert get(store, "k") == DATA
    assert fault.used == 1


def test_what_changes_on_its_way_is_not_taken(open_s3: OpenStore, proxy: FaultProxy) -> None:
    store = open_s3(endpoint_url=proxy.endpoint_url)
    put(store, "small", b"small")
    fault = proxy.add(Fault(of("PUT"), flip_request_at=16 * MIB))
    try:
        store.put_blob("k", in_pieces(), len(DATA), crc64=crc64(DATA))
    except Aof2Error:
        assert keys_of(store) == ["small"]
    else:
        assert get(store, "k") == DATA  # sent again
    assert fault.used == 1


def test_over_tls(open_s3: OpenStore, tls: TlsProxy, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tls.certificate))
    store = open_s3(endpoint_url=tls.url)
    put(store, "small", b"small")
    passes = 0

    def made() -> Iterator[bytes]:
        nonlocal passes
        passes += 1
        yield from in_pieces().chunks()  # type: ignore[misc]

    store.put_blob("k", ChunksSource(made), len(DATA), crc64=crc64(DATA))
    assert passes == 1  # what is encrypted need not be hashed for its signature
    assert get(store, "k") == DATA
