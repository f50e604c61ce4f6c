"""What the tests of the remote share."""

from __future__ import annotations

import random
import threading

from aof2.engine.env import Env
from aof2.engine.remote.store import RemoteStore

MIB = 1 << 20


def data_of(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def get(store: RemoteStore, key: str) -> bytes:
    return store.get_blob(key)[1]


def put(store: RemoteStore, key: str, data: bytes) -> str:
    return store.put_blob(key, data, len(data))


def keys_of(store: RemoteStore, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


class Clock:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept: list[float] = []
        self._lock = threading.Lock()

    def env(self, seed: int = 7) -> Env:
        return Env(seed=seed, monotonic_s=lambda: self.now_s, now_ms=lambda: int(self.now_s * 1000))

    def sleep_s(self, seconds: float) -> None:
        with self._lock:
            self.slept.append(seconds)
            self.now_s += seconds
