"""Durable, taken at its word: the remote is copied when `wait` returns, restored elsewhere, and compared.

Each round changes a directory of its own under load, waits for it, kills daemon and channel in every other one, copies
the remote at that moment, restores the copy into an empty state_dir, mounts it and compares names, bytes, attributes.

Owner: the test or `scripts/torture durable` that runs the rounds.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from aof2.engine.settings.loader import load_settings
from aof2.fs.bench.seaweed import REGION
from aof2.fs.control.client import ControlClient
from tests.mount.load import content
from tests.mount.portrait import differences, portrait
from tests.mount.world import World, kill, world
from tests.support.seaweed import Seaweed

COPIES_MAX = 20


class Copier(Protocol):
    """Copies a volume's remote; `conf` is the [remote] of the world that goes on with a copy."""

    def copy(self, name: str) -> str:
        """The copy's url."""

    def conf(self, url: str) -> str: ...


class DirectoryCopier:
    """Hard links: objects of a directory remote are replaced, never changed."""

    def __init__(self, remote: Path, to: Path) -> None:
        self._remote = remote
        self._to = to

    def copy(self, name: str) -> str:
        target = self._to / name
        for _ in range(COPIES_MAX):
            done = subprocess.run(["cp", "-al", self._remote, target], capture_output=True, check=False)
            if done.returncode == 0:
                return f"file://{target}"
            shutil.rmtree(target)  # something was replaced meanwhile: a later copy has it, too
        raise AssertionError(f"no copy of {self._remote}: {done.stderr!r}")

    def conf(self, url: str) -> str:
        return f'[remote]\nurl = "{url}"\n'


class S3Copier:
    """Every object below a prefix to another one."""

    def __init__(self, server: Seaweed, prefix: str) -> None:
        import boto3

        self._server = server
        self._prefix = prefix
        self.client = boto3.client(
            "s3",
            endpoint_url=server.endpoint_url,
            region_name=REGION,
            aws_access_key_id=server.access_key,
            aws_secret_access_key=server.secret_key,
        )

    def keys(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2")
        found = pages.paginate(Bucket=self._server.bucket, Prefix=f"{self._prefix}/{prefix}")
        return [row["Key"] for page in found for row in page.get("Contents", ())]

    def copy(self, name: str) -> str:
        for _ in range(COPIES_MAX):
            with contextlib.suppress(self.client.exceptions.ClientError):
                for key in self.keys():
                    source = {"Bucket": self._server.bucket, "Key": key}
                    to = f"{name}{key.removeprefix(self._prefix)}"
                    self.client.copy_object(Bucket=self._server.bucket, Key=to, CopySource=source)
                return f"s3://{self._server.bucket}/{name}"
        raise AssertionError(f"no copy of {self._prefix}")

    def conf(self, url: str) -> str:
        endpoint = f'endpoint_url = "{self._server.endpoint_url}"\nregion = "{REGION}"\ntimeout = "10s"\n'
        return f'[remote]\nurl = "{url}"\n{endpoint}'


def ask(w: World, verb: str, **args: Any) -> Any:
    """What the command would ask the daemon, without a process for it."""
    with ControlClient(load_settings(w.conf)) as client:
        return client.call(verb, **args)


def wait(w: World, *names: str) -> Any:
    return ask(w, "wait", paths=[f"default/{name}".rstrip("/") for name in names])


class Load:
    """Writes, renames and removes in a directory of its own until told to stop; a mount that is killed under it is
    asked again."""

    def __init__(self, w: World) -> None:
        self._top = w.files / "load"
        self._stop = threading.Event()
        self.operations = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[Load]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()

    def _run(self) -> None:
        n = 0
        while not self._stop.is_set():
            n += 1
            with contextlib.suppress(OSError):
                self._top.mkdir(exist_ok=True)
                (self._top / f"f{n}").write_bytes(content(n, 3000))
                (self._top / f"f{n}").rename(self._top / f"g{n % 50}")
                self.operations += 1
            self._stop.wait(0.002)


class DurableRounds:
    """Rounds on one volume."""

    def __init__(self, w: World, copier: Copier, seed: int, say: Callable[[str], object] = lambda _: None) -> None:
        self._w = w
        self._copier = copier
        self._rng = random.Random(seed)
        self._say = say
        self.kills = 0

    def run(self, rounds: int) -> None:
        with Load(self._w).running():
            for n in range(rounds):
                self._round(n, killing=n % 2 == 1)
                self._say(f"round {n + 1}: durable, copied, restored")

    def _round(self, n: int, *, killing: bool) -> None:
        w = self._w
        top = w.files / f"r{n}"
        names = self._change(top, n)
        before = portrait(top)
        # The directory, or each name of it: both ways must do.
        wait(w, *([f"r{n}"] if self._rng.random() < 0.5 else [f"r{n}/{name}" for name in names]))
        if self._rng.random() < 0.5:  # and a file by itself, whose blob and log go up side by side
            (top / "alone").write_bytes(content(n, 4096))
            before = portrait(top)
            wait(w, f"r{n}/alone")
        if killing:
            self.kills += 1
            for pid in (w.daemon_pid(), w.channel_pid()) if self._rng.random() < 0.5 else (w.daemon_pid(),):
                kill(pid)
        url = self._copier.copy(f"copy{n}")
        with restored(w, self._copier, url, f"back{n}") as (back, report):
            assert [x for x in report["lost"] if f"/r{n}" in x["path"]] == []
            assert not report["complete"], "the writer has not unmounted"
            assert differences(before, portrait(back.files / f"r{n}")) == []
        if killing:
            w.mount()

    def _change(self, top: Path, n: int) -> list[str]:
        """Files, directories, links and attributes; the names that are left."""
        rng = self._rng
        top.mkdir()
        (top / "deep" / "er").mkdir(parents=True)
        for i in range(rng.randint(1, 5)):
            (top / f"f{i}").write_bytes(content(n * 10 + i, rng.choice((1, 4096, 20_000, 300_000))))
        (top / "deep" / "er" / "file").write_bytes(content(n, 777))
        (top / "empty").touch()
        os.symlink("f0", top / "symlink")
        os.link(top / "f0", top / "deep" / "hard")
        if rng.random() < 0.5:
            wait(self._w, f"r{n}")  # what is published before it is changed again
        changes: list[Callable[[], object]] = [
            lambda: (top / "f0").chmod(0o640),
            lambda: os.setxattr(top / "f0", "user.colour", b"blue"),
            lambda: os.utime(top / "f0", ns=(1, 1_000_000_007)),
            lambda: (top / "deep").rename(top / "deeper"),
            lambda: (top / "empty").rename(top / "void"),
            lambda: (top / "symlink").unlink(),
            lambda: _append(top / "f0", b"more"),
            lambda: os.truncate(top / "f0", 1),
        ]
        rng.shuffle(changes)
        for change in changes[: rng.randint(0, len(changes))]:
            change()
        return sorted(os.listdir(top))


def _append(path: Path, data: bytes) -> None:
    with open(path, "ab") as f:
        f.write(data)


@contextlib.contextmanager
def restored(w: World, copier: Copier, url: str, name: str) -> Iterator[tuple[World, dict[str, Any]]]:
    """A world made from the copy alone, mounted, and what restore said."""
    root = w.root / name
    with world(root, remote=copier.conf(url), environ=w.environ) as back:
        done = back.run("restore", "--json", "--from", url)
        assert done.code in (0, 1), f"{done.out}{done.err}"
        report = json.loads(done.out)
        assert report["gaps"] == [], report
        back.mount()
        yield back, report
    shutil.rmtree(root)


def in_every_order(w: World, files: int, seed: int) -> None:
    """Files opened, closed and appended to in every order, many of them at once; all closed at the end."""
    rng = random.Random(seed)
    top = w.files / "orders"
    top.mkdir()
    open_files: list[int] = []
    for n in range(files):
        (top / f"f{n}").write_bytes(content(n, rng.choice((0, 10, 5000))))
    for n in rng.sample(range(files), files):
        open_files.append(os.open(top / f"f{n}", rng.choice((os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND))))
    rng.shuffle(open_files)
    for fd in open_files[: files // 2]:
        os.close(fd)
    for n in rng.sample(range(files), files):
        _append(top / f"f{n}", b"%d" % n)
    for fd in open_files[files // 2 :]:
        os.close(fd)
    for n in rng.sample(range(files), files // 2):
        _append(top / f"f{n}", b"again")


def after_umount(w: World, copier: Copier) -> None:
    """Everything in the mount is in the copy of the remote that a clean unmount leaves, and restore says so."""
    before = portrait(w.files)
    w.umount()
    url = copier.copy("after-umount")
    with restored(w, copier, url, "back-after-umount") as (back, report):
        assert report["complete"], report
        assert report["clean"]
        assert differences(before, portrait(back.files)) == []
