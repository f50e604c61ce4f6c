"""One S3 server for the folder; a store of each backend; the proxy that makes bad weather."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aof2.engine.env import Env
from aof2.engine.remote.open import open_remote
from aof2.engine.remote.store import RemoteStore
from aof2.engine.settings.remote import RemoteSettings
from tests.support.seaweed import FaultProxy, Seaweed, running_seaweed

_numbers = itertools.count()


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with running_seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def credentials(seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The credential chain finds the server's keys, and nothing else of this machine."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in seaweed.environ().items():
        monkeypatch.setenv(name, value)


OpenStore = Callable[..., RemoteStore]


@pytest.fixture
def open_s3(seaweed: Seaweed, credentials: None) -> Iterator[OpenStore]:
    """Opens stores in one fresh prefix: the same one for all of a test."""
    prefix = f"t{next(_numbers)}"
    opened: list[RemoteStore] = []

    def open_one(
        *, endpoint_url: str = "", bucket: str = "", env: Env | None = None, **settings: object
    ) -> RemoteStore:
        sleep_s = settings.pop("sleep_s", None)
        wanted = RemoteSettings(
            url=f"s3://{bucket or seaweed.bucket}/{prefix}",
            endpoint_url=endpoint_url or seaweed.endpoint_url,
            **settings,  # type: ignore[arg-type]
        )
        store = open_remote(env or Env(), wanted, sleep_s=sleep_s)  # type: ignore[arg-type]
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def open_directory(tmp_path: Path) -> Iterator[OpenStore]:
    opened: list[RemoteStore] = []

    def open_one(*, env: Env | None = None, **settings: object) -> RemoteStore:
        sleep_s = settings.pop("sleep_s", None)
        wanted = RemoteSettings(url=f"file://{tmp_path}/remote", **settings)  # type: ignore[arg-type]
        store = open_remote(env or Env(), wanted, sleep_s=sleep_s)  # type: ignore[arg-type]
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture(params=["directory", "s3"])
def open_store(request: pytest.FixtureRequest) -> OpenStore:
    """Each backend in turn: whoever takes this fixture is part of the contract."""
    opener: OpenStore = request.getfixturevalue(f"open_{request.param}")
    return opener


@pytest.fixture
def store(open_store: OpenStore) -> RemoteStore:
    return open_store()


@pytest.fixture
def proxy(seaweed: Seaweed) -> Iterator[FaultProxy]:
    between = FaultProxy(seaweed.port)
    yield between
    between.clear()
    between.down()
