"""A remote that refuses us: keys that are rotated, 403 for a while, a denied prefix. Nothing is called durable
meanwhile, and all of it catches up by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aof2.fs.bench.seaweed import REGION
from aof2.fs.control.protocol import ControlError
from tests.mount.durable import S3Copier, ask, restored, wait
from tests.mount.load import content
from tests.mount.outage import BlinkingLoad, compare
from tests.mount.portrait import differences, portrait
from tests.mount.world import World, wait_for, world
from tests.support.seaweed import Fault, FaultProxy, Seaweed, Seen, running_seaweed

DURABLE = "user.aof2.durable"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with running_seaweed(tmp_path_factory.mktemp("weed")) as running:
        yield running


@pytest.fixture
def proxy(server: Seaweed) -> Iterator[FaultProxy]:
    made = FaultProxy(server.port)
    yield made
    made.down()


def remote_conf(url: str, endpoint_url: str) -> str:
    return f'[remote]\nurl = "{url}"\nendpoint_url = "{endpoint_url}"\nregion = "{REGION}"\ntimeout = "1s"\n'


@pytest.fixture
def w(tmp_path: Path, server: Seaweed, proxy: FaultProxy) -> Iterator[World]:
    conf = remote_conf(f"s3://{server.bucket}/{tmp_path.name}", proxy.endpoint_url)
    with world(tmp_path / "w", remote=conf, environ=server.environ()) as made:
        made.mount()
        yield made


def is_durable(w: World, name: str) -> bool:
    return os.getxattr(w.files / name, DURABLE) == b"1"


def log_of(w: World) -> dict[str, Any]:
    return next(s for s in ask(w, "status")["volume"]["replication"] if s["tenant"] == "default")


def denied(part: str) -> Fault:
    """Every request whose path has `part` in it is refused."""

    def matches(seen: Seen) -> bool:
        return part in seen.path

    return Fault(matches, times=None, status=403, code="AccessDenied")


@pytest.mark.parametrize("part", ["", "/manifest/"])
def test_what_is_refused_is_not_durable_and_catches_up_by_itself(
    w: World, server: Seaweed, proxy: FaultProxy, tmp_path: Path, part: str
) -> None:
    (w.files / "before").write_bytes(content(1, 5000))
    wait(w, "before")
    proxy.add(denied(part))
    (w.files / "new").write_bytes(content(2, 5000))
    (w.files / "before").chmod(0o600)
    for verb, args in (("wait", {"paths": ["default/new"]}), ("checkpoint", {"wait": True}), ("flush", {"wait": True})):
        with pytest.raises(ControlError, match="refuses"):
            ask(w, verb, **args)
    assert not is_durable(w, "new")
    status = ask(w, "status")
    assert status["mount"]["remote_refused"] > 0
    assert status["mount"]["refused_since_ms"] > 0
    assert "AccessDenied" in status["mount"]["refused_why"]
    assert not is_durable(w, "before")
    lag = log_of(w)
    assert lag["refused"], lag
    assert lag["there"] < lag["here"], lag
    assert "refuses us since" in w.ok("status")
    assert "refuses us since" in w.ok("top", "--once")
    assert (
        f"aof2_remote_refused_total {status['mount']['remote_refused']}"[:26]
        in (w.mnt / ".aof2" / "metrics").read_text()
    )
    proxy.clear()
    wait_for(lambda: is_durable(w, "new") and is_durable(w, "before"), "it to catch up by itself")
    wait(w, "")
    # What was refused last may be asked again later than what was waited for.
    wait_for(lambda: ask(w, "status")["mount"]["refused_since_ms"] is None, "the refusal to be over")
    before = portrait(w.files)
    copier = S3Copier(server, tmp_path.name)
    with restored(w, copier, copier.copy(f"{tmp_path.name}-copy"), "back") as (back, _):
        assert differences(before, portrait(back.files)) == []


def test_keys_are_rotated_under_load(tmp_path: Path, server: Seaweed) -> None:
    """Through the shared credentials file, as a rotation does it; the server knows the new keys alone."""
    keys = tmp_path / "credentials"

    def write_keys() -> None:
        text = f"[default]\naws_access_key_id = {server.access_key}\naws_secret_access_key = {server.secret_key}\n"
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").rename(keys)

    write_keys()
    environ = {k: v for k, v in server.environ().items() if "KEY" not in k}
    environ["AWS_SHARED_CREDENTIALS_FILE"] = str(keys)
    conf = remote_conf(f"s3://{server.bucket}/rotated", server.endpoint_url)
    with world(tmp_path / "w", remote=conf, environ=environ) as w:
        w.mount()
        load = BlinkingLoad(w, files_max=120)
        with load.running():
            wait_for(lambda: len(load.files) > 20, "some files")
            wait(w, "f0")
            w.run("evict", w.files)
            server.rotate_keys()
            wait_for(lambda: ask(w, "status")["mount"]["refused_since_ms"] is not None, "the old keys to be refused")
            newest = max(load.files, key=lambda name: int(name[1:]))
            assert w.run("wait", w.files / newest).code == 1
            write_keys()
            wait_for(lambda: ask(w, "status")["mount"]["refused_since_ms"] is None, "the new keys to be taken")
        assert load.wrong == [], load.wrong[:3]
        wait_for(lambda: w.run("wait", w.files).code == 0, "all of it to be durable")
        w.ok("evict", w.files)
        compare(w, load.files)
        assert load.refused < load.reads
        w.umount()
        w.verify("--remote")
