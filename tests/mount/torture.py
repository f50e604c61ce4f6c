"""`scripts/torture`: the long versions of what tests/mount does in short, by hand."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

from aof2.fs.bench.seaweed import REGION
from tests.mount import damage as damaged
from tests.mount import test_full_disk as full_disk
from tests.mount.durable import Copier, DirectoryCopier, DurableRounds, S3Copier, after_umount, in_every_order
from tests.mount.following import pair
from tests.mount.inboxrounds import InboxRounds, delivered_to
from tests.mount.machines import Machines
from tests.mount.namerounds import KINDS as NAME_KINDS
from tests.mount.namerounds import NameRounds
from tests.mount.outage import BlinkingLoad, everything_is_there, s3_world
from tests.mount.power import PowerRounds, on_a_disk
from tests.mount.recency import Trace
from tests.mount.room import MIB, TOOLS, command, content_hash, random_file, run_all, sha256, watching
from tests.mount.rounds import KINDS, Rounds
from tests.mount.streaming import TENANTS as STREAM_TENANTS
from tests.mount.streaming import StreamRounds
from tests.mount.world import World, rss_bytes, wait_for, world
from tests.mount.world import kill as kill_process
from tests.support.mount import mounted_volume
from tests.support.seaweed import running_seaweed
from tests.verify import faults as injected

CACHE_BYTES = 64 << 20  # the smallest there is
NAMES_MAX_S = 300.0
INBOX_KEEP_S = 65.0
FULL_MAX_S = 3600.0  # 10,000 files are evicted and read again


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Be rough with a mounted volume, and say what came of it."""


@main.command()
@click.option("--times", default=50, show_default=True)
@click.option("--seed", default=None, type=int, help="Of the run before, to do the same again.")
@click.option("--kind", type=click.Choice(sorted(set(KINDS))), multiple=True, help="What is killed; by default each.")
@click.option("--keep", is_flag=True, help="Leave the folder, also when all went well.")
def kill(times: int, seed: int | None, kind: tuple[str, ...], keep: bool) -> None:
    """Kill daemon, channel or both while files are written; mount; compare with what was acknowledged."""
    seed = int(time.time()) if seed is None else seed
    root = Path(tempfile.mkdtemp(prefix="aof2-torture-"))
    click.echo(f"seed {seed}, in {root}")
    with world(root) as w:
        rounds = Rounds(w, seed, click.echo)
        rounds.run(times, kind or KINDS)
        for line in w.complaints():
            click.echo(f"log: {line[:400]}")
    click.echo(f"{times} kills: {rounds.acknowledged} operations acknowledged, all there")
    if not keep:
        shutil.rmtree(root)


@main.command()
@click.option("--times", default=1000, show_default=True)
def follow(times: int) -> None:
    """Write and wait on the writer, then open on a follower: never ENOENT, never other bytes."""
    root = Path(tempfile.mkdtemp(prefix="aof2-torture-"))
    took_s: list[float] = []
    with pair(root, timeout_s=0) as p:
        for number in range(times):
            path = p.writer.path / f"dir{number % 7}" / f"round{number}"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"%d" % number)
            p.durable(path)
            started_s = time.monotonic()
            found = p.there(path).read_bytes()
            took_s.append(time.monotonic() - started_s)
            if found != b"%d" % number:
                raise click.ClickException(f"round {number}: other bytes: {found!r}")
    took_s.sort()
    click.echo(f"{times} rounds, all there; opened and read in {took_s[times // 2] * 1000:.1f} ms (median)")
    shutil.rmtree(root)


@main.command()
@click.option("--times", default=50, show_default=True)
@click.option("--processes", default=8, show_default=True, help="That change names at once.")
@click.option("--seed", default=None, type=int, help="Of the run before, to do the same again.")
@click.option("--kind", type=click.Choice(NAME_KINDS), multiple=True, help="What is killed; by default each in turn.")
def names(times: int, processes: int, seed: int | None, kind: tuple[str, ...]) -> None:
    """Kill daemon, channel or both under processes that change names; mount; compare with what each was told."""
    seed = int(time.time()) if seed is None else seed
    root = Path(tempfile.mkdtemp(prefix="aof2-torture-"))
    click.echo(f"seed {seed}, in {root}")
    with mounted_volume(root / "v", timeout_s=0) as volume:
        rounds = NameRounds(volume, root / "journals", seed, processes=processes)
        for n in range(times):
            kinds = kind or NAME_KINDS
            before, killed = rounds.answered, kinds[n % len(kinds)]
            with volume.deadline(NAMES_MAX_S):
                rounds.one(killed, rounds.rng.choice((10, 50, 200, 600)))
                volume.options = rounds.rng.choice(([], ["nopassthrough"]))
                if n % 5 == 4 or n == times - 1:
                    rounds.is_clean()
                    volume.mount()
            click.echo(f"round {n}: killed {killed}; {rounds.answered - before} changes answered, all there")
    click.echo(f"{times} kills: {rounds.answered} changes answered, all there, verify clean")
    shutil.rmtree(root)


@main.command()
@click.option("--times", default=30, show_default=True)
@click.option("--seed", default=None, type=int, help="Of the run before, to do the same again.")
def power(times: int, seed: int | None) -> None:
    """Cut the power of state_dir's disk under processes that change and fsync names; mount; compare. Root only."""
    seed = int(time.time()) if seed is None else seed
    root = Path(tempfile.mkdtemp(prefix="aof2-torture-"))
    click.echo(f"seed {seed}, in {root}")
    with on_a_disk(root, options=[], timeout_s=0) as (volume, disk):
        rounds = PowerRounds(volume, disk, root / "journals", seed)
        for n in range(times):
            with volume.deadline(NAMES_MAX_S):
                rounds.one(rounds.rng.choice((10, 50, 200, 600)))
            volume.options = rounds.rng.choice(([], ["nopassthrough"]))
            click.echo(f"round {n}: {rounds.answered} changes answered so far, {rounds.lost} not synced and lost")
    click.echo(f"{times} cuts: what was synced is there, verify clean")
    shutil.rmtree(root)


@main.command()
@click.option("--jobs", default=200, show_default=True, help="Of three one is killed half-way, one is put twice.")
@click.option("--processes", default=4, show_default=True, help="That deliver at once.")
@click.option("--times", default=10, show_default=True, help="The daemon is killed.")
@click.option("--seed", default=None, type=int, help="Of the run before, to do the same again.")
def inbox(jobs: int, processes: int, times: int, seed: int | None) -> None:
    """Deliver jobs through a real S3 server while deliverers and the writer are killed; compare; sweep; verify."""
    seed = int(time.time()) if seed is None else seed
    root = Path(tempfile.mkdtemp(prefix="aof2-torture-"))
    click.echo(f"seed {seed}, in {root}")
    (root / "weed").mkdir()
    with running_seaweed(root / "weed") as server, delivered_to(root / "v", server) as volume:
        rounds = InboxRounds(volume, seed, click.echo)
        began_s = time.monotonic()
        rounds.run(jobs, processes, times)
        click.echo(f"{time.monotonic() - began_s:.0f} s: each committed job is there once and whole; waiting to sweep")
        volume.umount()
        rounds.keep_short()
        time.sleep(INBOX_KEEP_S)
        volume.mount()
        rounds.is_clean(jobs)
        volume.umount()
        click.echo(volume.done("verify", "--remote").strip())
        volume.mount()
    click.echo(f"{jobs} jobs, {times} kills: nothing of those that were killed, the bucket is clean")
    shutil.rmtree(root)


@main.command()
@click.option("--seconds", default=60, show_default=True, help="How long the load goes on.")
@click.option("--seed", default=None, type=int)
def outage(seconds: int, seed: int | None) -> None:
    """Stop and start a real S3 server again and again under writers, readers and evictions; then compare."""
    seed = int(time.time()) if seed is None else seed
    root = Path(tempfile.mkdtemp(prefix="aof2-torture-"))
    click.echo(f"seed {seed}, in {root}")
    (root / "weed").mkdir()
    with running_seaweed(root / "weed") as server, s3_world(root / "w", server, "torture") as w:
        w.mount()
        load = BlinkingLoad(w)
        rng, until_s, blinks = random.Random(seed), time.monotonic() + seconds, 0
        with load.running():
            while time.monotonic() < until_s:
                time.sleep(rng.uniform(0, 5))
                w.run("evict", w.files)
                server.stop()
                blinks += 1
                time.sleep(rng.uniform(0, 8))
                if rng.random() < 0.5:
                    w.run("evict", w.files)
                server.start()
        assert load.wrong == [], load.wrong[:5]
        click.echo(f"{blinks} outages: {len(load.files)} files written, {load.reads} reads right, {load.refused} EIO")
        everything_is_there(w, load.files)
    click.echo("everything is in the remote, verify is clean")
    shutil.rmtree(root)


@main.command()
@click.option("--rounds", default=200, show_default=True)
@click.option("--files", default=2000, show_default=True, help="Opened, closed and appended to before the unmount.")
@click.option("--s3", is_flag=True, help="On SeaweedFS instead of a directory.")
@click.option("--seed", default=None, type=int)
def durable(rounds: int, files: int, s3: bool, seed: int | None) -> None:
    """Copy the remote when `wait` returns, kill in every other round, restore the copy, compare; then unmount, too."""
    seed = int(time.time()) if seed is None else seed
    root = Path(tempfile.mkdtemp(prefix="aof2-torture-"))
    click.echo(f"seed {seed}, in {root}")
    with contextlib.ExitStack() as stack:
        copier: Copier
        if s3:
            (root / "weed").mkdir()
            server = stack.enter_context(running_seaweed(root / "weed"))
            w = stack.enter_context(s3_world(root / "w", server, "torture", timeout="30s"))
            copier = S3Copier(server, "torture")
        else:
            w = stack.enter_context(world(root / "w"))
            copier = DirectoryCopier(w.root / "remote", w.root)
        w.mount()
        done = DurableRounds(w, copier, seed, click.echo)
        done.run(rounds)
        click.echo(f"{rounds} rounds, {done.kills} kills: what was waited for is in every copy")
        in_every_order(w, files, seed)
        after_umount(w, copier)
        click.echo(f"{files} files opened, closed and appended to: all in the remote after umount")
    shutil.rmtree(root)


@main.command()
@click.option("--rounds", default=3, show_default=True, help="Spark, the daemon, both are killed in turn.")
@click.option("--writers", default=8, show_default=True)
@click.option("--seed", default=None, type=int)
def streams(rounds: int, writers: int, seed: int | None) -> None:
    """Read a stream by Spark, two ways, while it is appended to and both are killed; on a real S3 server."""
    seed = int(time.time()) if seed is None else seed
    root = Path(tempfile.mkdtemp(prefix="aof2-torture-"))
    click.echo(f"seed {seed}, in {root}")
    (root / "weed").mkdir()
    with running_seaweed(root / "weed") as server:
        os.environ.update(server.environ())
        remote = {"url": f"s3://{server.bucket}/streams", "endpoint_url": server.endpoint_url, "region": REGION}
        with mounted_volume(root / "v", tenants=STREAM_TENANTS, timeout_s=0, remote=remote) as volume:
            run = StreamRounds(volume, seed, click.echo, writers=writers)
            run.run(rounds)
            volume.done("wait", volume.mountpoint / "events")
            volume.umount()
            volume.done("verify", "--remote")
    click.echo(f"{rounds} kills: every answered line once in the stream and in both sinks, verify clean")
    shutil.rmtree(root)


@main.command()
@click.option("--files", default=100_000, show_default=True)
@click.option("--per-directory", default=1000, show_default=True)
def many(files: int, per_directory: int) -> None:
    """A tree of many empty files: time to make, list and mount it again, and the daemon's memory."""
    root = Path(tempfile.mkdtemp(prefix="aof2-torture-"))
    click.echo(f"in {root}")
    with world(root) as w:

        @contextlib.contextmanager
        def step(what: str) -> Iterator[None]:
            began_s = time.monotonic()
            yield
            took_s, rss = time.monotonic() - began_s, rss_bytes(w.daemon_pid()) >> 20
            click.echo(f"{what}: {took_s:.1f} s ({files / took_s:,.0f}/s); daemon {rss} MiB")

        w.mount()
        click.echo(f"an empty volume: daemon {rss_bytes(w.daemon_pid()) >> 20} MiB")
        with step("made"):
            for n in range(files):
                if n % per_directory == 0:
                    folder = w.files / f"d{n // per_directory}"
                    folder.mkdir()
                os.close(os.open(folder / f"f{n}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        with step("durable"):
            wait_for(lambda: w.run("wait", w.files, hang_s=3600).code == 0, "all of them to be durable", 3600)
        for again in ("", ", again"):
            with step(f"find{again}"):
                found = subprocess.run(["find", w.files, "-type", "f", "-size", "0"], capture_output=True, check=True)
                assert found.stdout.count(b"\n") == files
        with step("unmounted"):
            w.ok("umount", hang_s=3600)
            w.ok("mount", hang_s=3600)
        with step("mounted again after a clean end, find"):
            found = subprocess.run(["find", w.files, "-type", "f"], capture_output=True, check=True)
            assert found.stdout.count(b"\n") == files
        with step("killed and mounted"):
            kill_process(w.daemon_pid())
            w.ok("mount", hang_s=3600)
        with step("one directory listed"):
            assert len(os.listdir(w.files / "d0")) == min(files, per_directory)
        with step("removed"):
            shutil.rmtree(w.files / "d0") if files > 200_000 else [shutil.rmtree(p) for p in w.files.iterdir()]
        w.ok("umount", hang_s=3600)
        with step("verified"):
            w.verify()
    shutil.rmtree(root)


@main.command()
@click.option("--files", default=5000, show_default=True)
@click.option("--accesses", default=15_000, show_default=True)
@click.option("--exponent", default=1.0, show_default=True, help="Of the Zipf distribution.")
@click.option("--seed", default=None, type=int)
def recency(files: int, accesses: int, exponent: float, seed: int | None) -> None:
    """Read files by a Zipf trace through a cache of a tenth of them, a remount in the middle; compare with LRU."""
    seed = int(time.time()) if seed is None else seed
    root = Path(tempfile.mkdtemp(prefix="aof2-torture-"))
    click.echo(f"seed {seed}, in {root}")
    tenants = {"default": {"kind": "files", "compression": "none"}}
    with mounted_volume(root, tenants=tenants, timeout_s=0, cache={"hot_bytes": f"{CACHE_BYTES}"}) as volume:
        trace = Trace(volume, files=files, hot_bytes=CACHE_BYTES, seed=seed)
        trace.write()
        click.echo(f"{files} files, {trace.data_bytes >> 20} MiB, through a cache of {CACHE_BYTES >> 20} MiB")
        outcome = trace.run(accesses, s=exponent, say=click.echo)
        assert trace.disk_bytes() <= CACHE_BYTES * 1.01, f"{trace.disk_bytes()} bytes on the disk"
        assert volume.complaints() == [], volume.complaints()[:3]
    click.echo(f"hit rate {outcome.mount:.4f}, textbook LRU {outcome.lru:.4f}: {outcome.mount - outcome.lru:+.4f}")
    assert outcome.mount >= outcome.lru - 0.03, "more than 3 % below LRU"
    shutil.rmtree(root)


ALONE = ("cp", "dd", "rsync", "parquet", "append", "sendfile", "splice")
ROOM_SETS = (*((tool,) for tool in ALONE), ("cp", "dd", "rsync", "parquet"))


@main.command("room")
@click.option("--hot-mib", default=512, show_default=True, help="cache.hot_bytes.")
@click.option("--factor", default=3.0, show_default=True, help="Each writer's data, in caches.")
@click.option(
    "--tool", type=click.Choice(TOOLS), multiple=True, help="Only these, at once; by default each, then four."
)
def room_command(hot_mib: int, factor: float, tool: tuple[str, ...]) -> None:
    """Write more than the cache holds to a real S3 server, one tool at a time, then four at once; watch the cache."""
    root = Path(tempfile.mkdtemp(prefix="aof2-torture-"))
    (root / "weed").mkdir()
    source = random_file(root / "source", int(hot_mib * factor) * MIB)
    expected = sha256(source)
    click.echo(f"{hot_mib} MiB of cache, {source.stat().st_size // MIB} MiB a file, in {root}")
    with running_seaweed(root / "weed") as server:
        for n, tools in enumerate([tool] if tool else ROOM_SETS):
            remote = (
                f'[remote]\nurl = "s3://{server.bucket}/room{n}"\nendpoint_url = "{server.endpoint_url}"\n'
                f'region = "{REGION}"\n[cache]\nhot_bytes = "{hot_mib}MiB"\nmin_free = "256MiB"\n'
            )
            with world(root / f"w{n}", remote=remote, environ=server.environ()) as w:
                w.mount()
                _fill(w, tools, source, expected, hot_mib * MIB)
            shutil.rmtree(root / f"w{n}")
    shutil.rmtree(root)


def _fill(w: World, tools: tuple[str, ...], source: Path, expected: str, limit: int) -> None:
    """One round: all of these tools at once; then the bytes, after every local copy is gone."""
    targets = {tool: w.files / tool for tool in tools}
    began_s = time.monotonic()
    with watching(w.state / "hot_cache") as seen:
        run_all([command(tool, source, path) for tool, path in targets.items()], 3600)
        took_s = time.monotonic() - began_s
        w.ok("wait", w.files, hang_s=3600)
        for path in targets.values():
            wait_for(lambda path=path: w.run("evict", path).code == 0, "it is never evicted")
        for tool, path in targets.items():
            assert content_hash(tool, path) == expected, f"{tool}: other bytes"
    rate = len(tools) * source.stat().st_size / MIB / took_s
    click.echo(f"{'+'.join(tools)}: {took_s:.1f} s, {rate:.0f} MiB/s; the cache took {seen.most / MIB:.1f} MiB at most")
    assert seen.most <= limit, f"{seen.most - limit} bytes over the limit"
    for line in w.complaints():
        click.echo(f"log: {line[:400]}")


@main.command()
@click.option("--steps", default=200, show_default=True)
@click.option("--seed", default=None, type=int, help="Of the run before, to do the same again.")
def machines(steps: int, seed: int | None) -> None:
    """Two machines on one remote, killed, restored, coming back late: the healthy one goes on, the stale refuses."""
    seed = int(time.time()) if seed is None else seed
    root = Path(tempfile.mkdtemp(prefix="aof2-torture-"))
    click.echo(f"seed {seed}, in {root}")
    run = Machines(root / "w", seed, click.echo)
    try:
        run.run(steps)
    finally:
        run.close()
    click.echo(f"{steps} steps: {run.taken} taken over, {run.refused} refused, {len(run.durable)} files, all there")
    shutil.rmtree(root)


@main.command()
@click.option("--every", default=1, show_default=True, help="Only each so many-th case.")
def damage(every: int) -> None:
    """Damage each chunk, bundle, snapshot and audit range, here and there, one at a time; mount, repair, verify."""
    root = Path(tempfile.mkdtemp(prefix="aof2-torture-"))
    click.echo(f"in {root}")
    count, wrong = damaged.run_all(root, click.echo, every=every)
    if wrong:
        raise click.ClickException(f"{len(wrong)} of {count} cases went wrong; see {root}")
    click.echo(f"{count} cases: all mounted, mended and clean")
    shutil.rmtree(root)


@main.command()
@click.option("--times", default=100, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--first", default=0, show_default=True, help="Begin with this one.")
@click.option("--spark", "with_spark", is_flag=True, help="Also by tasks of Spark, in one session of local[2].")
def faults(times: int, seed: int, first: int, with_spark: bool) -> None:
    """Inject faults of ten kinds into a volume's remote, one at a time; each verifier finds each, and says the same."""
    root = Path(tempfile.mkdtemp(prefix="aof2-torture-"))
    click.echo(f"seed {seed}, in {root}")
    template = injected.make_volume(root / "template")
    found = 0
    with injected.verifiers(with_spark) as verifiers:
        for number in range(first, times):
            kind = list(injected.FAULTS)[number % len(injected.FAULTS)]
            settings = injected.copied(template, root / "hurt")
            fault = injected.FAULTS[kind](settings, random.Random(seed * 1000 + number))
            said = {name: verifier(settings) for name, verifier in verifiers.items()}
            missed = [name for name, one in said.items() if not injected.finds(one, fault)]
            unlike = [
                name for name, one in said.items() if injected.told(one, fault) != injected.told(said["local"], fault)
            ]
            if missed or unlike:
                wrong = f"missed by {missed}, told otherwise by {unlike}"
                raise click.ClickException(f"fault {number}, {fault.what}: {wrong}; see {root}")
            found += 1
            click.echo(f"{number}: {kind}: {fault.what}: found")
            shutil.rmtree(root / "hurt")
    click.echo(f"{found} faults, each found by {' and '.join(said)}, nothing else")
    shutil.rmtree(root)


@main.command()
@click.option("--rounds", default=3, show_default=True)
def full(rounds: int) -> None:
    """Fill a disk of 4,000 inodes, and one of 400 MiB, to the last; then remove, evict, kill, unmount, mount and
    compare. Root only: the disks are loop filesystems."""
    for n in range(rounds):
        for mode in full_disk.MODES:
            for inodes in (full_disk.INODES, 0):
                click.echo(f"round {n}, {mode}, {f'{inodes} inodes' if inodes else '400 MiB'}")
                _fill_and_check(mode, inodes)


def _fill_and_check(mode: str, inodes: int) -> None:
    root = Path(tempfile.mkdtemp(prefix="aof2-torture-"))
    with full_disk.on_small_disk(root, mode, inodes=inodes, timeout_s=FULL_MAX_S) as (volume, disk):
        if inodes:
            files = full_disk.fill_with_files(volume)
        else:
            files = full_disk.some_files(volume, 500)
            disk.take_bytes()
        click.echo(f"  {len(files)} files, {disk.free_inodes()} inodes and {disk.free_bytes()} bytes free")
        full_disk.put_through(volume, files, killed=True)
        disk.give_back()
        full_disk.is_clean(volume)
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
