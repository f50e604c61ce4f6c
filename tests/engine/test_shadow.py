"""`[manifest] shadow`: a second fold of the same records, kept as JSON, compared while the volume works."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from aof2.engine.catalog import tables as t
from aof2.engine.manifest import payloads as p
from aof2.engine.settings import Settings
from aof2.engine.volume import Volume
from tests.engine.helpers import KIB, put_object, read_object, run_volume, small_settings, unlink_object

TENANT = 1


def shadowed(tmp_path: Path, **keys: object) -> Settings:
    settings = small_settings(tmp_path, **keys)  # type: ignore[arg-type]
    return msgspec.structs.replace(settings, manifest=msgspec.structs.replace(settings.manifest, shadow=True))


def shadow_of(settings: Settings) -> dict[str, dict[str, object]]:
    path = settings.volume.state_dir / "manifest" / str(TENANT) / "shadow.json"
    return dict(json.loads(path.read_text())["segments"])


async def work(v: Volume, name: bytes) -> None:
    """Everything that happens to a file."""
    key = await put_object(v, "default", name, name * 50_000)
    await v.checkpoint("default")
    await v.evict([key])
    assert await read_object(v, key, 0, 10) == (name * 10)[:10]
    await v.hydrator.settle()
    await put_object(v, "default", name + b"-dirty", b"x" * KIB)
    await unlink_object(v, "default", name + b"-dirty")


def test_it_agrees_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    settings = shadowed(tmp_path)

    async def first(v: Volume) -> None:
        await work(v, b"a")
        await v.shadows.compare()
        assert v.shadows.divergence == 0

    async def second(v: Volume) -> None:
        await work(v, b"b")
        await v.shadows.compare()
        assert v.shadows.divergence == 0
        assert "manifest_shadow_divergence 0" in v.metrics.render().decode()

    run_volume(settings, first)
    kept = shadow_of(settings)
    assert kept and any(s["remote"] for s in kept.values())
    run_volume(settings, second)
    assert len(shadow_of(settings)) > len(kept)


@pytest.mark.parametrize("left", ["nothing", "an older one", "not JSON"])
def test_where_its_file_is_behind(tmp_path: Path, left: str) -> None:
    settings = shadowed(tmp_path)
    path = settings.volume.state_dir / "manifest" / str(TENANT) / "shadow.json"

    async def body(v: Volume) -> None:
        await work(v, b"a")

    async def check(v: Volume) -> None:
        await work(v, b"c")
        await v.shadows.compare()
        assert v.shadows.divergence == 0

    run_volume(settings, body)
    older = path.read_bytes()
    run_volume(settings, body_named(b"b"))
    if left == "nothing":
        path.unlink()
    else:
        path.write_bytes(older if left == "an older one" else b"{nope")
    run_volume(settings, check)


def body_named(name: bytes):  # type: ignore[no-untyped-def]
    async def body(v: Volume) -> None:
        await work(v, name)

    return body


def test_a_difference_is_counted_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(v: Volume) -> None:
        await work(v, b"a")
        await v.shadows.compare()
        with v.catalog.view() as view:
            [chunk_id, *_] = [chunk_id for chunk_id, _ in view.scan(TENANT, t.CHUNKS)]
        shadow = v.shadows._shadows[TENANT]
        shadow.state.segments[str(chunk_id)]["durable_bytes"] = 7  # as a fold with a bug would leave it
        shadow.touched.add(chunk_id)
        await v.shadows.compare()
        assert v.shadows.divergence == 1
        assert "manifest_shadow_divergence 1" in v.metrics.render().decode()
        v.writer.call(TENANT, lambda b: b.record(p.HydrationDone(5), segment_id=999))
        await v.shadows.compare()
        assert v.shadows.divergence == 1  # what is new agrees

    run_volume(shadowed(tmp_path), body)
    assert "shadow and log disagree" in caplog.text
    caplog.clear()


def test_off_is_off(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)

    async def body(v: Volume) -> None:
        await work(v, b"a")
        assert v.shadows.divergence == 0

    run_volume(settings, body)
    assert not list(tmp_path.rglob("shadow.json"))
