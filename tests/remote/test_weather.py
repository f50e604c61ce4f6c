"""Bad weather on the way to a real server: every failure is a typed error within its deadline, and passes by itself."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from aof2.engine.env import Env
from aof2.engine.remote.errors import (
    FencedError,
    RemoteAuthError,
    RemoteCorruptError,
    RemoteThrottledError,
    RemoteUnavailableError,
)
from aof2.engine.remote.resilience import BreakerState
from aof2.engine.remote.s3_read import RANGE_BYTES
from aof2.engine.remote.source import ChunksSource
from aof2.engine.remote.store import RemoteStore
from aof2.native import crc64
from tests.remote.conftest import OpenStore
from tests.remote.helpers import MIB, data_of, get, keys_of, put
from tests.support.seaweed import Fault, FaultProxy, Seaweed, of

SECOND, THIRD = f"bytes={RANGE_BYTES}-", f"bytes={2 * RANGE_BYTES}-"


class JumpingEnv(Env):
    """The real clock, which a test can move on: a breaker's cool-down passes at once."""

    def __init__(self) -> None:
        self.jumped_s = 0.0
        super().__init__(seed=3, monotonic_s=lambda: time.monotonic() + self.jumped_s)


@pytest.fixture
def env() -> JumpingEnv:
    return JumpingEnv()


@pytest.fixture
def naps() -> list[float]:
    return []


@pytest.fixture
def store(open_s3: OpenStore, proxy: FaultProxy, env: JumpingEnv, naps: list[float]) -> RemoteStore:
    return open_s3(endpoint_url=proxy.endpoint_url, env=env, sleep_s=naps.append, retries=3)


@pytest.fixture
def calm(open_s3: OpenStore) -> RemoteStore:
    """The same objects, without the proxy."""
    return open_s3()


@pytest.fixture
def server(seaweed: Seaweed) -> Iterator[Seaweed]:
    """A server that the test may stop."""
    yield seaweed
    seaweed.start()


def test_slow_down_slows_down_and_passes(store: RemoteStore, proxy: FaultProxy, naps: list[float]) -> None:
    proxy.add(Fault(of("PUT"), times=2, status=503, code="SlowDown"))
    put(store, "k", b"x")
    stats = store.stats()
    assert (stats.throttled, stats.retries, stats.unavailable) == (2, 2, 0)
    assert stats.interval_s > 0
    assert naps
    assert get(store, "k") == b"x"


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (429, "TooManyRequests")])
def test_slow_down_for_ever(store: RemoteStore, proxy: FaultProxy, status: int, code: str) -> None:
    proxy.add(Fault(times=None, status=status, code=code))
    with pytest.raises(RemoteThrottledError, match=code) as e:
        store.get_range("k", 0, 1)
    assert e.value.reason_code == 0
    assert proxy.count("GET") == 4
    assert store.stats().breaker is BreakerState.CLOSED


@pytest.mark.parametrize(("status", "code"), [(500, "InternalError"), (503, "ServiceUnavailable"), (502, "")])
def test_server_errors_are_retried(store: RemoteStore, proxy: FaultProxy, status: int, code: str) -> None:
    proxy.add(Fault(of("PUT"), times=2, status=status, code=code))
    put(store, "k", b"x")
    assert get(store, "k") == b"x"
    proxy.add(Fault(times=None, status=status, code=code))
    with pytest.raises(RemoteUnavailableError) as e:
        store.head_blob("k")
    assert e.value.reason_code == 3


@pytest.mark.parametrize("code", ["AccessDenied", "SignatureDoesNotMatch", "ExpiredToken", "RequestTimeTooSkewed"])
def test_denied_is_not_retried(store: RemoteStore, proxy: FaultProxy, code: str) -> None:
    proxy.add(Fault(times=None, status=400 if code == "ExpiredToken" else 403, code=code))
    with pytest.raises(RemoteAuthError, match=code) as e:
        store.put_if_absent("k", b"x")
    assert e.value.reason_code == 2
    asked = len(proxy.seen)
    assert asked <= 2  # by the quick way, then by the SDK, whose word counts
    with pytest.raises(RemoteAuthError):
        store.get_range("k", 0, 1)
    assert len(proxy.seen) == asked + 2  # by a signed URL, then by the SDK


@pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_keys(open_s3: OpenStore, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv(wrong, "WRONGKEYWRONGKEY")
    store = open_s3(endpoint_url=proxy.endpoint_url)
    calls = [
        lambda: store.head_blob("k"),
        lambda: store.put_if_absent("k", b"x"),
        lambda: store.get_range("k", 0, 1),
        lambda: list(store.list()),
        lambda: store.delete(["k"]),
        lambda: store.abort_stale_uploads(0),
    ]
    for number, call in enumerate(calls, 1):
        with pytest.raises(RemoteAuthError) as e:
            call()
        assert e.value.reason_code == 2
        assert "WRONGKEY" not in str(e.value)
        assert e.value.__cause__ is None
        # a small put, and a range, are sent by a quicker way first, then by the SDK
        assert len(proxy.seen) == number + (number >= 2) + (number >= 3)
    assert store.stats().breaker is BreakerState.CLOSED


def test_no_keys_at_all(open_s3: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(RemoteAuthError, match="credentials") as e:
        open_s3().head_blob("k")
    assert e.value.reason_code == 2


def test_a_missing_bucket_is_not_a_missing_object(open_s3: OpenStore) -> None:
    store = open_s3(bucket="no-such-bucket", sleep_s=lambda s: None)
    calls = [
        lambda: store.head_blob("k"),
        lambda: store.get_range("k", 0, 1),
        lambda: store.get_blob("k"),
        lambda: list(store.list()),
        lambda: store.put_blob("k", b"x", 1),
    ]
    for call in calls:
        with pytest.raises(RemoteUnavailableError, match="not exist") as e:
            call()
        assert e.value.reason_code == 3


def test_a_body_cut_short_is_read_again(store: RemoteStore, proxy: FaultProxy) -> None:
    data = data_of(9 * MIB)
    put(store, "k", data)
    for cut_at in (0, 1, 3 * MIB):
        proxy.add(Fault(of("GET"), cut_at=cut_at))
        assert get(store, "k") == data
        proxy.add(Fault(of("GET"), cut_at=cut_at))
        assert store.get_range("k", 5, 6 * MIB) == data[5 : 5 + 6 * MIB]
    proxy.add(Fault(of("GET"), times=None, cut_at=100))
    with pytest.raises(RemoteUnavailableError):
        store.get_range("k", 0, MIB)


def test_a_flipped_byte_is_read_again_then_reported(store: RemoteStore, proxy: FaultProxy) -> None:
    data = data_of(9 * MIB)
    put(store, "k", data)
    for matches in (of("GET"), lambda seen: SECOND in seen.headers.get("Range", "")):
        proxy.add(Fault(matches, flip_at=77))
        assert get(store, "k") == data
    proxy.add(Fault(of("GET"), times=None, flip_at=77))
    with pytest.raises(RemoteCorruptError, match="read twice"):
        store.get_blob("k")


@pytest.mark.parametrize("size", [1000, 17 * MIB])
def test_a_byte_flipped_on_the_way_up_is_refused_by_the_server(
    store: RemoteStore, proxy: FaultProxy, size: int
) -> None:
    data = data_of(size)
    fault = proxy.add(Fault(of("PUT"), flip_request_at=500))
    put(store, "k", data)
    assert fault.used == 1
    assert store.stats().retries == 1
    assert get(store, "k") == data


def test_an_answer_that_got_lost_is_no_conflict(store: RemoteStore, proxy: FaultProxy) -> None:
    lost = proxy.add(Fault(of("PUT"), drop_after=True))
    etag = store.put_if_absent("m", b"mine")
    assert lost.used == 1
    assert etag == store.put_if_absent("m", b"mine")
    first = store.replace_if_match("v", b"1", None)
    proxy.add(Fault(of("PUT"), drop_after=True))
    second = store.replace_if_match("v", b"2", first)
    assert get(store, "v") == b"2"
    proxy.add(Fault(of("PUT"), drop_after=True))
    with pytest.raises(FencedError):
        store.replace_if_match("v", b"3", first)
    assert store.replace_if_match("v", b"4", second)


def test_a_completion_whose_answer_got_lost(store: RemoteStore, proxy: FaultProxy) -> None:
    data = data_of(17 * MIB)
    lost = proxy.add(Fault(of("POST", "uploadId="), drop_after=True))
    store.put_blob("k", data, len(data))
    assert lost.used == 1
    assert get(store, "k") == data
    assert store.abort_stale_uploads(0) == 0


def test_part_failures_are_retried_part_by_part(store: RemoteStore, proxy: FaultProxy) -> None:
    data = data_of(40 * MIB)
    for number in (1, 3, 5):
        proxy.add(Fault(of("PUT", f"partNumber={number}"), drop=True))
    put(store, "k", data)
    assert [proxy.count("PUT", f"partNumber={n}") for n in range(1, 6)] == [2, 1, 2, 1, 2]
    assert get(store, "k") == data


def test_an_upload_that_fails_leaves_nothing(store: RemoteStore, calm: RemoteStore, proxy: FaultProxy) -> None:
    proxy.add(Fault(of("PUT", "partNumber=2"), times=None, status=400, code="InvalidArgument"))
    done = threading.Event()
    proxy.add(Fault(of("DELETE"), call=done.set))
    with pytest.raises(Exception, match="InvalidArgument"):
        put(store, "k", data_of(40 * MIB))
    assert done.wait(30)
    assert calm.head_blob("k") is None
    store.close()


def test_uploads_of_crashed_writers_are_cleared_away(store: RemoteStore, calm: RemoteStore, proxy: FaultProxy) -> None:
    proxy.add(Fault(of("PUT", "partNumber=2"), times=None, status=400, code="InvalidArgument"))
    proxy.add(Fault(of("DELETE"), times=None, drop=True))  # the writer died before it could abort
    with pytest.raises(Exception, match="InvalidArgument"):
        put(store, "k", data_of(17 * MIB))
    assert calm.abort_stale_uploads(3600) == 0
    assert calm.abort_stale_uploads(0) == 1
    assert calm.abort_stale_uploads(0) == 0
    assert keys_of(calm) == []


def test_an_upload_under_way_is_not_stale(store: RemoteStore, proxy: FaultProxy) -> None:
    data = data_of(17 * MIB)
    found: list[int] = []
    proxy.add(Fault(of("PUT", "partNumber=2"), call=lambda: found.append(store.abort_stale_uploads(0))))
    put(store, "k", data)
    assert found == [0]
    assert get(store, "k") == data


def test_a_silent_server_does_not_hold_the_caller(open_s3: OpenStore, store: RemoteStore, proxy: FaultProxy) -> None:
    put(store, "k", b"x")
    hasty = open_s3(endpoint_url=proxy.endpoint_url, timeout_s=0.2)
    go_on = threading.Event()
    proxy.add(Fault(times=None, hold=go_on))
    try:
        for call in (
            lambda: hasty.head_blob("k"),
            lambda: store.get_blob("k", timeout_s=0.2),
            lambda: hasty.put_blob("new", b"y", 1),
            lambda: hasty.delete(["k"]),
            lambda: list(hasty.list()),
        ):
            with pytest.raises(RemoteUnavailableError, match=r"not done within 0\.2"):
                call()
    finally:
        go_on.set()


def test_refused_connections_then_back(store: RemoteStore, proxy: FaultProxy, env: JumpingEnv) -> None:
    data = data_of(5 * MIB)
    put(store, "k", data)
    proxy.down()
    with pytest.raises(RemoteUnavailableError, match="connect") as e:
        store.get_range("k", 0, 1)
    assert e.value.reason_code == 3
    proxy.up()
    assert get(store, "k") == data


@pytest.mark.expects_warnings
def test_a_long_outage_opens_the_breaker_until_the_server_is_back(
    store: RemoteStore, proxy: FaultProxy, env: JumpingEnv, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, "k", b"x")
    proxy.down()
    for _ in range(2):
        with pytest.raises(RemoteUnavailableError):
            store.get_range("k", 0, 1)
    assert "is unavailable" in caplog.text
    requests = store.stats().requests
    with pytest.raises(RemoteUnavailableError, match="has been unavailable for"):
        store.get_range("k", 0, 1)
    assert store.stats().requests == requests
    assert store.stats().breaker is BreakerState.OPEN
    proxy.up()
    env.jumped_s += 60
    assert store.get_range("k", 0, 1) == b"x"
    assert store.stats().breaker is BreakerState.CLOSED


@pytest.mark.expects_warnings
def test_the_server_dies_in_the_middle_of_an_upload(
    store: RemoteStore, calm: RemoteStore, proxy: FaultProxy, server: Seaweed, env: JumpingEnv
) -> None:
    data = data_of(40 * MIB)
    proxy.add(Fault(of("PUT", "partNumber=3"), call=server.stop, drop=True))
    with pytest.raises(RemoteUnavailableError) as e:
        put(store, "k", data)
    assert e.value.reason_code == 3
    server.start()
    assert calm.head_blob("k") is None
    assert keys_of(calm) == []
    env.jumped_s += 60
    put(store, "k", data)
    assert get(store, "k") == data
    calm.abort_stale_uploads(0)
    assert calm.abort_stale_uploads(0) == 0
    assert get(calm, "k") == data


@pytest.mark.expects_warnings
def test_the_server_dies_in_the_middle_of_a_download(
    store: RemoteStore, proxy: FaultProxy, server: Seaweed, env: JumpingEnv
) -> None:
    data = data_of(40 * MIB)
    put(store, "k", data)
    proxy.add(Fault(lambda seen: THIRD in seen.headers.get("Range", ""), call=server.stop, drop=True))
    with pytest.raises(RemoteUnavailableError):
        get(store, "k")
    server.start()
    env.jumped_s += 60
    assert get(store, "k") == data


@pytest.mark.expects_warnings
def test_a_restart_in_the_middle_is_ridden_out(
    open_s3: OpenStore, proxy: FaultProxy, server: Seaweed, env: JumpingEnv
) -> None:
    data = data_of(24 * MIB)
    store = open_s3(endpoint_url=proxy.endpoint_url, env=env, retries=20)

    def restart() -> None:
        server.stop()
        server.start()

    proxy.add(Fault(of("PUT", "partNumber=2"), call=restart))
    put(store, "k", data)
    assert get(store, "k") == data


def test_an_object_replaced_while_it_is_read_is_read_again(
    store: RemoteStore, calm: RemoteStore, proxy: FaultProxy
) -> None:
    old, new = data_of(9 * MIB, seed=1), data_of(9 * MIB, seed=2)
    put(store, "k", old)
    first = lambda seen: SECOND in seen.headers.get("Range", "")  # noqa: E731
    proxy.add(Fault(first, call=lambda: put(calm, "k", new)))
    assert get(store, "k") == new


def test_the_second_put_is_one_head(store: RemoteStore, proxy: FaultProxy) -> None:
    data = data_of(17 * MIB)
    put(store, "k", data)
    proxy.clear()
    put(store, "k", data)
    assert [seen.method for seen in proxy.seen] == ["HEAD"]


def test_compose_of_large_objects_is_done_by_the_server(store: RemoteStore, proxy: FaultProxy) -> None:
    for name in ("a", "b"):
        put(store, name, data_of(6 * MIB, seed=ord(name)))
    proxy.clear()
    before = store.stats()
    store.compose("c", ["a", "b"])
    after = store.stats()
    assert (after.bytes_sent, after.bytes_received) == (before.bytes_sent, before.bytes_received)
    assert sum("X-Amz-Copy-Source" in {h.title() for h in seen.headers} for seen in proxy.seen) == 2


def test_delete_goes_in_batches_and_reports_what_failed(store: RemoteStore, proxy: FaultProxy) -> None:
    put(store, "k/0", b"x")
    proxy.clear()
    store.delete(f"k/{i}" for i in range(1001))
    assert proxy.count("POST") == 2
    assert keys_of(store) == []


@pytest.mark.parametrize(("status", "code"), [(501, "NotImplemented"), (400, "MissingContentMD5")])
def test_a_server_without_batches_deletes_one_by_one(
    store: RemoteStore, proxy: FaultProxy, status: int, code: str
) -> None:
    for i in range(3):
        put(store, f"k/{i}", b"x")
    proxy.add(Fault(of("POST", "delete"), times=None, status=status, code=code))
    store.delete(f"k/{i}" for i in range(5))
    assert keys_of(store) == []
    assert proxy.count("DELETE") == 5


def test_delete_of_what_must_stay_is_denied(store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    client = store._calls._sdk.client  # type: ignore[attr-defined]
    answer = {"Errors": [{"Key": "k", "Code": "AccessDenied", "Message": "no"}]}
    monkeypatch.setattr(client, "delete_objects", lambda **kw: answer)
    with pytest.raises(RemoteAuthError, match="AccessDenied"):
        store.delete(["k"])


def test_listing_pages(store: RemoteStore, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(7):
        put(store, f"k/{i}", b"x")
    client = store._calls._sdk.client  # type: ignore[attr-defined]
    whole_page = client.list_objects_v2
    monkeypatch.setattr(client, "list_objects_v2", lambda **kw: whole_page(MaxKeys=3, **kw))
    proxy.clear()
    proxy.add(Fault(of("GET", "continuation-token"), drop=True))
    assert keys_of(store, "k/") == [f"k/{i}" for i in range(7)]
    assert proxy.count("GET") == 4


def test_nothing_secret_is_logged(
    store: RemoteStore, proxy: FaultProxy, seaweed: Seaweed, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="aof2"):
        proxy.add(Fault(times=2, status=500, code="InternalError"))
        store.head_blob("k")
        proxy.add(Fault(status=403, code="AccessDenied"))
        with pytest.raises(RemoteAuthError):
            store.head_blob("k")
    text = "".join(str(record.__dict__) for record in caplog.records if record.name.startswith("aof2"))
    assert text
    assert seaweed.access_key not in text
    assert seaweed.secret_key not in text


def test_a_source_made_on_the_way_is_started_anew(store: RemoteStore, proxy: FaultProxy) -> None:
    data = data_of(20 * MIB)
    starts: list[int] = []

    def chunks() -> Iterator[bytes]:
        starts.append(1)
        yield from (data[i : i + MIB] for i in range(0, len(data), MIB))

    proxy.add(Fault(of("PUT", "partNumber=2"), times=2, drop=True))
    store.put_blob("k", ChunksSource(chunks), len(data), crc64=crc64(data))
    assert len(starts) == 1
    assert get(store, "k") == data
