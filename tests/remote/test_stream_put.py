"""Large objects on their way to a server nearby: one connection, sent as they are read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aof2.engine.errors import Aof2Error, CorruptError
from aof2.engine.remote import s3_put, s3_sign, s3_wire
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


@pytest.mark.parametrize("signed", [False, True])
def test_what_ends_early_is_no_object(open_s3: OpenStore, monkeypatch: pytest.MonkeyPatch, *, signed: bool) -> None:
    """On its way: where a hash is signed it was right when that was taken."""
    if signed:
        monkeypatch.setattr(s3_put, "_is_private", lambda _: False)
    store = open_s3()
    put(store, "small", b"small")
    passes = 0

    def made() -> Iterator[bytes]:
        nonlocal passes
        passes += 1
        for at in range(0, len(DATA), MIB):
            if passes > signed and at > 9 * MIB:
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


# -- packs, and what is signed -----------------------------------------------------------------------------------------

PACK = data_of(3 * MIB + 7)


def payloads_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is signed of each payload from here on, of those that are not small."""
    seen: list[str] = []

    def signed(*args: Any) -> dict[str, str]:
        headers = s3_sign.signed_headers(*args)
        if isinstance(args[5], str):
            seen.append(headers["x-amz-content-sha256"])
        return headers

    monkeypatch.setattr(s3_put, "signed_headers", signed)
    return seen


def test_a_pack_goes_in_one_request(open_s3: OpenStore, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_put, "NEAR_S", 0.0)  # however far away: the SDK has no more connections for it
    store = open_s3(endpoint_url=proxy.endpoint_url)
    put(store, "small", b"small")
    before = store.stats().bytes_sent
    proxy.seen.clear()
    store.put_blob("pack", PACK, len(PACK), crc64=crc64(PACK))
    assert (proxy.count("PUT"), proxy.count("POST"), proxy.count("HEAD")) == (1, 0, 0)
    assert store.stats().bytes_sent == before + len(PACK)
    assert get(store, "pack") == PACK
    with pytest.raises(CorruptError, match="changed"):
        store.put_blob("other", PACK, len(PACK), crc64=crc64(PACK) ^ 1)
    assert keys_of(store) == ["pack", "small"]


def test_a_server_that_reckons_is_told_the_crc64_alone(open_s3: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_s3()
    payloads = payloads_of(monkeypatch)
    store.put_blob("first", PACK, len(PACK), crc64=crc64(PACK))
    store.put_blob("second", PACK, len(PACK), crc64=crc64(PACK))
    assert payloads == [hashlib.sha256(PACK).hexdigest(), s3_sign.UNSIGNED]
    assert get(store, "second") == PACK


def test_a_conditional_put_is_always_signed(open_s3: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_s3()
    put(store, "small", b"small")
    sizes = [3 * MIB, 14 * MIB + 1]  # too small to be copied on the server
    put(store, "a", DATA[: sizes[0]])
    put(store, "b", DATA[sizes[0] : sum(sizes)])
    payloads = payloads_of(monkeypatch)
    store.compose("joined", ["a", "b"])
    assert payloads == [hashlib.sha256(DATA[: sum(sizes)]).hexdigest()]
    assert get(store, "joined") == DATA[: sum(sizes)]


def test_an_answer_without_a_crc64_is_not_trusted(
    open_s3: OpenStore, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not signed and not reckoned is sent again, signed; and so is what comes later."""
    store = open_s3(endpoint_url=proxy.endpoint_url)
    store.put_blob("first", PACK, len(PACK), crc64=crc64(PACK))
    payloads = payloads_of(monkeypatch)
    parse = s3_wire.parse_head
    monkeypatch.setattr(s3_wire, "parse_head", lambda data: parse(data)._replace(crc64=""))
    proxy.seen.clear()
    store.put_blob("second", PACK, len(PACK), crc64=crc64(PACK))
    assert proxy.count("PUT") == 2
    store.put_blob("third", PACK, len(PACK), crc64=crc64(PACK))
    assert payloads == [s3_sign.UNSIGNED, hashlib.sha256(PACK).hexdigest()]
    assert get(store, "second") == get(store, "third") == PACK


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8333", True),
        ("http://localhost/b", True),
        ("http://[::1]:9000", True),
        ("http://10.1.2.3", True),
        ("http://192.168.1.2:9000", True),
        ("http://8.8.8.8", False),
        ("http://minio.example:9000", False),
        ("http://localhost.example", False),
    ],
)
def test_what_is_a_network_of_ours(url: str, *, expected: bool) -> None:
    assert s3_put._is_private(url) is expected


def test_a_pack_that_is_damaged_on_its_way(open_s3: OpenStore, proxy: FaultProxy) -> None:
    store = open_s3(endpoint_url=proxy.endpoint_url)
    store.put_blob("first", PACK, len(PACK), crc64=crc64(PACK))  # from here on without a hash
    fault = proxy.add(Fault(of("PUT"), flip_request_at=2 * MIB))
    try:
        store.put_blob("k", PACK, len(PACK), crc64=crc64(PACK))
    except Aof2Error:
        assert keys_of(store) == ["first"]
    else:
        assert get(store, "k") == PACK  # sent again
    assert fault.used == 1
