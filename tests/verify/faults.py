"""Faults of ten kinds, injected into what a volume has in its remote; and what a verifier has to say of each.

A fault is drawn with a seed: the same one hurts the same byte of the same object.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.manifest.format import chunk_key
from aof2.engine.remote import keys
from aof2.engine.remote.store import RemoteStore
from aof2.engine.settings import Settings
from aof2.engine.verify.findings import Finding, Kind, Report, Severity
from aof2.engine.verify.fromremote import verify_remote
from aof2.engine.verify.pieces import Piece, check_piece
from aof2.engine.verify.run import Told, verify
from aof2.engine.volume import Volume
from tests.engine.helpers import put_object, run_volume, small_settings
from tests.history.traffic import run_day

TENANT = 1
# What a machine without the volume's disk can say, too.
REMOTE_KINDS = frozenset(
    (
        *(Kind.REMOTE_MISSING, Kind.REMOTE_DAMAGED, Kind.REMOTE_ORPHAN, Kind.REMOTE_LOG, Kind.AUDIT),
        *(Kind.OBJECT, Kind.REFCOUNT, Kind.COUNTER, Kind.TIERS),
    )
)


class Fault(NamedTuple):
    """What was done, and the kind and key (or "") of the finding that must come of it."""

    what: str
    kind: Kind
    key: str


def make_volume(root: Path) -> Settings:
    """Blobs, packs, chunks, bundles and snapshots of logs, and audit ranges, all in the remote; cleanly closed."""
    settings = small_settings(root, compression="zstd", chunk_bytes=64 << 10)
    run_day(settings, hot_bytes=1 << 20, files=32, reads=60, minutes=300)
    for number in range(6):
        if any(key.endswith(".mlogs") for key, _ in objects(settings)):
            return settings
        run_volume(settings, partial(_more_log, number=number))
    raise AssertionError("no chunks of the log were bundled")


async def _more_log(v: Volume, number: int) -> None:
    """More chunks of the log, each in the remote before the next; old ones are bundled at some later mount."""
    for n in range(40):
        await put_object(v, "default", b"more-%d-%d" % (number, n), b"x" * 5000)
        await v.checkpoint("default")
        ends = v.replication.ends([TENANT])
        await v.replicated(ends)


def copied(template: Settings, root: Path) -> Settings:
    shutil.copytree(template.volume.state_dir.parent, root, dirs_exist_ok=True, symlinks=True)
    settings = small_settings(root)
    return msgspec.structs.replace(template, volume=settings.volume, remote=settings.remote)


def wrong(report: Report) -> list[Finding]:
    return [f for f in report.findings if f.severity is not Severity.NOTE]


def told(report: Report, fault: Fault | None = None) -> set[tuple[str, str, str]]:
    """What both verifiers must say alike. A bundle that is gone, of which the log in the remote does not tell yet, is
    told by its chunks."""
    found = {(f.kind, f.tenant, f.key) for f in wrong(report) if f.kind in REMOTE_KINDS}
    bundle = keys.parse_key(fault.key) if fault is not None else None
    if fault is None or not isinstance(bundle, keys.ManifestBundleKey):
        return found
    chunks = {chunk_key(bundle.stream_id, index) for index in range(bundle.first, bundle.last + 1)}
    return {(kind, tenant, fault.key if key in chunks else key) for kind, tenant, key in found}


def objects(settings: Settings) -> Iterator[tuple[str, Path]]:
    assert settings.remote.directory is not None
    for path in sorted(settings.remote.directory.rglob("*")):
        key = path.relative_to(settings.remote.directory).as_posix()
        if path.is_file() and key.split("/")[0] in ("checkpoints", "manifest", "audit"):
            yield key, path


def pick(settings: Settings, rng: random.Random, part: str, but: str = "\0") -> tuple[str, Path]:
    found = [(key, path) for key, path in objects(settings) if part in key and but not in key]
    assert found, f"no object like {part}"
    return rng.choice(found)


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.chmod(0o600)
    path.write_bytes(data)


def _bits(settings: Settings, rng: random.Random, *, part: str, but: str = "\0", kind: Kind) -> Fault:
    key, path = pick(settings, rng, part, but)
    flip(path, rng)
    return Fault(f"a bit of {key}", kind, key)


def _member(settings: Settings, rng: random.Random) -> Fault:
    """A bit within a member, not in the pack's own directory."""
    key, path = pick(settings, rng, "/pack-")
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data) // 2)] ^= 1 << rng.randrange(8)
    path.chmod(0o600)
    path.write_bytes(data)
    return Fault(f"a bit of a member of {key}", Kind.REMOTE_DAMAGED, key)


def _gone(settings: Settings, rng: random.Random, *, part: str, but: str = "\0", kind: Kind) -> Fault:
    key, path = pick(settings, rng, part, but)
    path.unlink()
    return Fault(f"{key} is gone", kind, key)


def _extra(settings: Settings, rng: random.Random) -> Fault:
    key, path = pick(settings, rng, "checkpoints/")
    name = f"{key.rsplit('/', 2)[0]}/{10**6 + rng.randrange(1000)}/{key.rsplit('/', 1)[1]}"
    assert settings.remote.directory is not None
    copy = settings.remote.directory / name
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, copy)
    os.utime(copy, (1, 1))
    return Fault(f"{name} is too much", Kind.REMOTE_ORPHAN, name)


def _rows(settings: Settings, rng: random.Random) -> Fault:
    """A buggy or forging writer's commit, which the log takes to the remote."""
    what, kind, forge = rng.choice(
        [
            ("a reference too many", Kind.REFCOUNT, _one_more_ref),
            ("a counter that says too much", Kind.COUNTER, _wrong_counter),
            ("an object longer than its chunks", Kind.OBJECT, _longer_object),
        ]
    )

    async def body(v: Volume) -> None:
        await result_of(v.writer.submit(TENANT, partial(forge, number=rng.randrange(1, 9))))

    run_volume(settings, body)
    return Fault(what, kind, "")


def _one_more_ref(b: Batch, number: int) -> None:
    sha256, row = list(b.scan(t.BLOBS))[number]
    b.put(t.BLOBS, sha256, msgspec.structs.replace(row, refs=row.refs + number))


def _wrong_counter(b: Batch, number: int) -> None:
    b.put(t.COUNTERS, "warm_bytes", (b.get(t.COUNTERS, "warm_bytes") or 0) + number)


def _longer_object(b: Batch, number: int) -> None:
    key, row = list(b.scan(t.OBJECTS))[number]
    b.put(t.OBJECTS, key, msgspec.structs.replace(row, size=row.size + number))


FAULTS: dict[str, Callable[[Settings, random.Random], Fault]] = {
    "blob": partial(_bits, part="/chunk-", kind=Kind.REMOTE_DAMAGED),
    "pack member": _member,
    "log": partial(_bits, part=".mlog", but=".mlogs", kind=Kind.REMOTE_LOG),
    "bundle": partial(_bits, part=".mlogs", kind=Kind.REMOTE_LOG),
    "snapshot": partial(_bits, part="/snapshot_", kind=Kind.REMOTE_LOG),
    "audit": partial(_bits, part="audit/", kind=Kind.AUDIT),
    "missing blob": partial(_gone, part="checkpoints/", kind=Kind.REMOTE_MISSING),
    "missing log": partial(_gone, part="manifest/", but="quarantine", kind=Kind.REMOTE_LOG),
    "extra object": _extra,
    "wrong rows": _rows,
}


# -- the verifiers

Verifier = Callable[[Settings], Report]


def here(store: RemoteStore, pieces: Iterator[Piece], tell: Told) -> None:
    """Checks pieces on this thread."""
    for piece in pieces:
        tell(piece, check_piece(store, piece))


def finds(report: Report, fault: Fault) -> bool:
    """Whether it tells of the fault, and of nothing else under another key."""
    found = told(report, fault)
    is_there = any(kind == fault.kind and (not fault.key or key == fault.key) for kind, _, key in found)
    return is_there and (not fault.key or {key for _, _, key in found} == {fault.key})


@contextlib.contextmanager
def verifiers(with_spark: bool) -> Iterator[dict[str, Verifier]]:
    """By name: the volume's own, the one without its disk, and the one of Spark."""
    found: dict[str, Verifier] = {
        "local": lambda settings: verify(settings, deep_remote=True, jobs=2),
        "remote": lambda settings: verify_remote(settings, here),
    }
    if not with_spark:
        yield found
        return
    import sys

    from pyspark.sql import SparkSession

    from aof2.engine.spark.pipelines import verify as pipeline
    from aof2.engine.spark.pipelines.seam import silent

    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    found["spark"] = lambda settings: msgspec.convert(
        pipeline.run(session, pipeline.Arguments(settings), silent).report, Report
    )
    try:
        yield found
    finally:
        session.stop()
