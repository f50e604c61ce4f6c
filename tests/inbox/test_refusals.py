"""Every commit that cannot be right is refused, with the reason, and leaves nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from aof2 import native
from aof2.engine.catalog import tables as t
from aof2.engine.inbox import Inbox, RefusedError
from aof2.engine.inbox.job import record_stage
from aof2.engine.remote.store import RemoteStore
from aof2.engine.settings.model import FilesTenant
from tests.inbox.helpers import Arena, lines, run, settings_of, troubles

Change = Callable[[dict[str, Any], RemoteStore], object]
SMALL = {"a": b"small a", "d/b": b"small b" * 500}
FOREIGN = f"checkpoints/default/1/pack-1-{0:064}.blob"
LARGE = {"large": bytes(range(256)) * 2000}


def commit_of(inbox: Inbox, job_id: str, files: dict[str, bytes]) -> dict[str, Any]:
    """What a deliverer would put, its blobs put."""
    job = inbox.open_job(job_id, to="out")
    for path, data in files.items():
        job.put(path, data)
    said: list[bytes] = []
    job._put = said.append  # type: ignore[method-assign]
    job.commit()
    found: dict[str, Any] = json.loads(said[0])
    return found


def put(store: RemoteStore, job_id: str, data: bytes, tenant: str = "default") -> None:
    store.put_blob(f"inbox/{tenant}/.knock/{job_id}", b"", 0)
    store.put_if_absent(f"inbox/{tenant}/{job_id}.commit", data)


def flipped(commit: dict[str, Any], store: RemoteStore, at: int, *, told: bool) -> None:
    """A byte of the first object is another one; with `told`, the commit lists that object's checksum."""
    staged = commit["objects"][0]
    data = bytearray(store.get_blob(staged["key"])[1])
    data[at] ^= 0x40
    store.delete([staged["key"]])
    store.put_blob(staged["key"], bytes(data), len(data))
    if told:
        staged["crc64"] = f"{native.crc64(data):016x}"


def set_in(*path: str | int, to: Any) -> Change:
    def change(commit: dict[str, Any], _: RemoteStore) -> None:
        at: Any = commit
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = to

    return change


CASES: list[tuple[str, dict[str, bytes], Change, str]] = [
    ("missing", LARGE, lambda c, s: s.delete([c["objects"][0]["key"]]), "missing"),
    ("missing-pack", SMALL, lambda c, s: s.delete([c["objects"][0]["key"]]), "missing"),
    ("replaced", LARGE, lambda c, s: flipped(c, s, 100, told=False), "checksum differ"),
    ("replaced-pack", SMALL, lambda c, s: flipped(c, s, 3, told=False), "checksum differ"),
    ("footer", LARGE, lambda c, s: flipped(c, s, -30, told=True), "damaged"),
    ("member", SMALL, lambda c, s: flipped(c, s, 3, told=True), "damaged"),
    ("directory", SMALL, lambda c, s: flipped(c, s, -100, told=True), "damaged"),
    ("volume", SMALL, set_in("volume_uuid", to="another"), "for volume another"),
    ("tenant", SMALL, set_in("tenant", to="events"), "tenant events"),
    ("id", SMALL, set_in("job_id", to="other"), "it is job other"),
    ("kind", {}, set_in("what", to="records"), "takes files"),
    ("dots", SMALL, set_in("files", 0, "path", to="../a"), "name that no file"),
    ("root", SMALL, set_in("files", 0, "path", to="/a"), "name that no file"),
    ("nul", SMALL, set_in("files", 0, "path", to="a\0b"), "name that no file"),
    ("long", SMALL, set_in("files", 0, "path", to="x" * 256), "name that no file"),
    ("deep", SMALL, set_in("files", 0, "path", to="/".join("x" * 65)), "deep"),
    ("nameless", SMALL, set_in("files", 0, "path", to=""), "without a name"),
    ("target", SMALL, set_in("to", to="a//b"), "name that no file"),
    ("twice", SMALL, set_in("files", 0, "path", to="d/b"), "twice"),
    ("both", SMALL, set_in("files", 0, "path", to="d"), "a file and a directory"),
    ("there", SMALL, set_in("to", to="taken"), "something of that name"),
    ("below-file", SMALL, set_in("to", to="taken/a"), "not a directory"),
    ("all", SMALL, lambda c, _: c.update(mode="overwrite", to=""), "whole tenant"),
    ("size", LARGE, set_in("files", 0, "size", to=5), "bytes are said"),
    ("hash", SMALL, set_in("files", 0, "sha256", to="0" * 64), "not that of its content"),
    ("content", SMALL, set_in("files", 0, "blobs", 0, "sha256", to="0" * 64), "another blob"),
    ("place", SMALL, set_in("files", 0, "blobs", 0, "offset", to=1), "not in it there"),
    ("beyond", LARGE, set_in("files", 0, "blobs", 0, "length", to=1 << 40), "behind its object"),
    ("object", SMALL, set_in("files", 0, "blobs", 0, "object", to=7), "in object 7"),
    ("number", SMALL, set_in("files", 0, "blobs", 0, "number", to=12), "not a deliverer's"),
    ("chunks", LARGE, lambda c, _: c["files"][0]["blobs"].reverse(), "not chunks"),
    (
        "foreign",
        SMALL,
        set_in("objects", 0, "key", to=FOREIGN),
        "no blob of",
    ),
    ("unknown", SMALL, lambda c, _: c.update(more=1), "unknown field"),
    ("newer", SMALL, set_in("format", to=2), "upgrade"),
]


def test_each_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)

    async def body(a: Arena) -> None:
        await a.deliver("before", "taken", SMALL)
        inbox = await a.inbox()
        for name, files, change, why in CASES:

            def attempt(name: str = name, files: dict[str, bytes] = files, change: Change = change) -> None:
                commit = commit_of(inbox, name, files)
                change(commit, a.store)
                put(a.store, name, json.dumps(commit).encode())

            await trio.to_thread.run_sync(attempt)
            await a.intake.look()
            with pytest.raises(RefusedError, match=why):
                await trio.to_thread.run_sync(inbox.open_job(name, to="out").answer)
            assert a.tree() == [f"taken/{path}" for path in sorted(SMALL)], name
        put(a.store, "no-json", b"{")
        await a.intake.look()
        with pytest.raises(RefusedError, match="not what the inbox holds"):
            inbox.open_job("no-json", to="out").answer()
        with a.volume.catalog.view() as view:
            tenant_id = a.volume.tenants.named("default").tenant_id
            assert [job for job, _ in view.scan(tenant_id, t.DELIVERIES)] == ["before"]
        # What a refusal named is mended, and the same job committed anew.
        done = await a.deliver("there", "elsewhere", SMALL)
        assert done is not None and a.tree("elsewhere") == sorted(SMALL)

    run(settings, body)
    assert troubles(settings) == []


def test_records_that_are_not_the_stream_s(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)

    async def refused(a: Arena, name: str, why: str, stage: Callable[[Any], object], to: str = "clicks") -> None:
        inbox = await a.inbox("events")
        job = inbox.open_job(name, to=to)

        def put_it() -> None:
            stage(job)
            job.commit()

        await trio.to_thread.run_sync(put_it)
        await a.intake.look()
        with pytest.raises(RefusedError, match=why):
            await trio.to_thread.run_sync(job.answer)

    def other_payload(job: Any) -> None:
        """An index of other records than those of the payload."""
        attempt = job._attempt
        record_stage(attempt, job.inbox.door)
        real = attempt.put_chunk
        attempt.put_chunk = lambda data: real(bytes(data).replace(b"record 7 ", b"record 8 "))
        job.put_records(lines("record", 20))

    async def body(a: Arena) -> None:
        await a.deliver_records("before", "clicks", lines("first", 5))
        await refused(a, "lines", "one line", lambda job: job.put_records([b"two\nlines\n"]))
        await refused(a, "damaged", "checksum", other_payload)
        await refused(a, "nested", "not a stream", lambda job: job.put_records([b"x\n"]), to="clicks/_append")
        assert await a.world.sealed() == b"".join(lines("first", 5))

    run(settings, body)
    assert troubles(settings) == []


def test_a_quota_that_is_full_of_what_cannot_go(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    tenants = {**settings.tenants, "default": FilesTenant(quota_bytes=1 << 20)}

    async def body(a: Arena) -> None:
        a.volume.quota.note_used("default", 1 << 20)
        with pytest.raises(RefusedError, match="quota"):
            await a.deliver("late", "out", SMALL)
        a.volume.quota.release_used("default", 1 << 20)
        assert await a.deliver("late", "out", SMALL) is not None

    run(msgspec.structs.replace(settings, tenants=tenants), body)
