"""Every verb of a mounted volume, on a real mount: FUSE, a daemon, a directory remote. Root only: it mounts."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aof2.fs.mountpoint import mounted_at
from tests.cli.test_command import AOF2
from tests.support import forked

pytestmark = [
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.path.exists("/dev/fuse"), reason="mounting takes root and /dev/fuse"
    ),
    pytest.mark.timeout(120),
]

CONF = """
[volume]
mountpoint = "mnt"
state_dir = "state"
[remote]
url = "file://remote"
timeout = "2s"
[cache]
hot_bytes = "64MiB"
warm_bytes = "0"
page_cache_bytes = "16MiB"
[metrics]
listen = ""
[tenants.default]
kind = "files"
[tenants.other]
kind = "files"
"""
DEADLINE_S = 60
needs_unshare = pytest.mark.skipif(shutil.which("unshare") is None, reason="util-linux")


class Machine:
    """A conf in a folder of its own, and the command run there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mnt = root / "mnt"
        self.state = root / "state"
        self.conf = root / "mount.conf"
        self.conf.write_text(CONF)

    def run(self, *args: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if k != "NOTIFY_SOCKET"} | {"AOF2_CONF": str(self.conf)}
        return forked.run([AOF2, *args], cwd=cwd or self.root, env=env, timeout=DEADLINE_S)

    def aof2(self, *args: object, fails: int = 0, cwd: Path | None = None) -> str:
        """What it prints; with `fails`, the line on stderr of a run that ends with that code."""
        done = self.run(*args, cwd=cwd)
        assert done.returncode == fails, (args, done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        if not fails:
            return done.stdout
        lines = done.stderr.splitlines()
        assert lines, (args, done.stdout)
        return lines[-1]

    def json(self, *args: object) -> dict:
        return json.loads(self.aof2(*args, "--json"))

    def pid(self) -> int:
        return self.json("status")["mount"]["pid"]

    def is_mounted(self) -> bool:
        return mounted_at(self.mnt) is not None

    def clear(self) -> None:
        """Whatever a test left: the mount, then its daemon."""
        subprocess.run(["umount", "-l", self.mnt], capture_output=True, timeout=30, check=False)
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                try:
                    log = os.readlink(process / "fd" / "2")
                except OSError:
                    continue
                if log == str(self.state / "daemon.log"):
                    os.kill(int(process.name), signal.SIGKILL)


def has_ended(pid: int) -> bool:
    """Also when its parent has not asked for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(what: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.05)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    one = Machine(tmp_path)
    yield one
    one.clear()


@pytest.fixture
def mounted(machine: Machine) -> Machine:
    machine.aof2("mount")
    return machine


def content(name: str, size: int = 3_000_000) -> bytes:
    return random.Random(name).randbytes(size)


def write(machine: Machine, path: str, size: int = 3_000_000) -> bytes:
    data = content(path, size)
    target = machine.mnt / path
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(data)
    return data


# -- mount and umount ----------------------------------------------------------------------------------------------


def test_mount_twice_and_umount_twice(machine: Machine) -> None:
    said = machine.aof2("mount")
    assert said.startswith(f"mounted at {machine.mnt}: default, other\n")
    assert "aof2 umount" in said  # what to try next
    assert sorted(os.listdir(machine.mnt)) == [".aof2", "default", "other"]
    pid = machine.pid()
    assert machine.aof2("mount") == f"already mounted at {machine.mnt}\n"
    assert machine.json("mount")["already"]
    assert machine.pid() == pid
    data = write(machine, "default/a")
    assert machine.json("umount")["uploaded"] in ({"files": 1, "bytes": len(data)}, {"files": 0, "bytes": 0})
    assert not machine.is_mounted()
    assert has_ended(pid)
    assert machine.aof2("umount") == f"{machine.mnt} is not mounted\n"
    assert machine.json("status", "default/a")["durable"]
    machine.aof2("mount")
    assert (machine.mnt / "default/a").read_bytes() == data


def test_another_mountpoint_than_the_confs(machine: Machine) -> None:
    elsewhere = machine.root / "else" / "where"
    machine.aof2("mount", elsewhere)
    try:
        (elsewhere / "default" / "a").write_bytes(b"x" * 1000)
        assert machine.json("status", elsewhere / "default" / "a")["size"] == 1000
        assert f"mounted at {elsewhere}" in machine.aof2("mount", fails=1)
        assert f"mounted at {elsewhere}, not there" in machine.aof2("umount", machine.mnt, fails=1)
        assert machine.aof2("umount") == f"unmounted {elsewhere}\n"
    finally:
        subprocess.run(["umount", "-l", elsewhere], capture_output=True, check=False)


def test_places_that_are_taken(machine: Machine) -> None:
    machine.mnt.mkdir()
    (machine.mnt / "file").touch()
    assert "not empty" in machine.aof2("mount", fails=1)
    (machine.mnt / "file").unlink()
    subprocess.run(["mount", "-t", "tmpfs", "none", machine.mnt], check=True)
    assert "something else is mounted there (tmpfs of none)" in machine.aof2("mount", fails=1)
    assert "not aof2; use umount" in machine.aof2("umount", fails=1)
    assert "bogus" in machine.aof2("mount", "-o", "bogus", fails=1)
    assert "volume.state_dir" in machine.aof2("mount", machine.state / "x", fails=1)
    assert not machine.state.exists()


def test_without_fuse(machine: Machine) -> None:
    """In a mount namespace where /dev has nothing in it."""
    script = f"mount -t tmpfs none /dev; exec {AOF2} mount --conf {machine.conf}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "aof2: /dev/fuse: there is none; run: modprobe fuse\n"
    machine.aof2("mount")


def test_a_busy_mount_stays(mounted: Machine) -> None:
    data = write(mounted, "default/a")
    with open(mounted.mnt / "default/a", "rb") as reader:
        said = mounted.aof2("umount", fails=1)
        assert f"({os.getpid()})" in said
        assert "in use" in said
        assert reader.read() == data
    mounted.aof2("umount")


def test_a_daemon_that_died_is_cleared_away(mounted: Machine) -> None:
    data = write(mounted, "default/a")
    os.kill(mounted.pid(), signal.SIGKILL)
    mounted.aof2("status")
    assert "not mounted" in mounted.aof2("warm", "default", fails=1)
    mounted.aof2("mount")
    assert (mounted.mnt / "default/a").read_bytes() == data
    mounted.aof2("checkpoint", "--wait")
    os.kill(mounted.pid(), signal.SIGKILL)
    assert "its daemon was gone" in mounted.aof2("umount")
    assert not mounted.is_mounted()


def test_sigterm_unmounts(mounted: Machine) -> None:
    data = write(mounted, "default/a")
    pid = mounted.pid()
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: not mounted.is_mounted())
    wait_for(lambda: has_ended(pid))
    mounted.aof2("mount")
    assert (mounted.mnt / "default/a").read_bytes() == data


@contextlib.contextmanager
def another_namespace(script: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process in a mount namespace of its own, with a copy of every mount, until the block ends."""
    process = subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", f"{script}\necho there; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        yield process
    finally:
        process.communicate(timeout=DEADLINE_S)


@needs_unshare
@pytest.mark.parametrize("how", ["aof2 umount", "SIGTERM", "umount(8)"])
def test_a_copy_of_the_mount_elsewhere_keeps_no_daemon(mounted: Machine, how: str) -> None:
    data = write(mounted, "default/a")
    pid = mounted.pid()
    with another_namespace() as elsewhere:
        if how == "aof2 umount":
            mounted.aof2("umount")
            assert has_ended(pid)
        elif how == "SIGTERM":
            os.kill(pid, signal.SIGTERM)
            wait_for(lambda: has_ended(pid))
        else:
            subprocess.run(["umount", mounted.mnt], check=True)  # the daemon ends when its volume is wanted
        mounted.aof2("mount")
        assert mounted.is_mounted() and has_ended(pid) and elsewhere.poll() is None
        assert (mounted.mnt / "default/a").read_bytes() == data
    mounted.aof2("umount")


@needs_unshare
def test_a_file_that_is_open_elsewhere_is_named(mounted: Machine) -> None:
    write(mounted, "default/a")
    pid = mounted.pid()
    with another_namespace(f"exec 3<'{mounted.mnt}/default/a'"):
        said = mounted.aof2("umount", fails=1)
        assert "1 file(s) are (default/a) open in another mount namespace" in said
        assert not mounted.is_mounted() and not has_ended(pid)
    wait_for(lambda: has_ended(pid))
    mounted.aof2("mount")


def test_a_mount_that_is_bound_to_a_second_place(mounted: Machine) -> None:
    second = mounted.root / "second"
    second.mkdir()
    subprocess.run(["mount", "--bind", mounted.mnt / "default", second], check=True)
    try:
        assert f"still has it mounted at {second}" in mounted.aof2("umount", fails=1)
    finally:
        subprocess.run(["umount", second], check=True)
    mounted.aof2("mount")


def test_mounting_again_at_once(mounted: Machine) -> None:
    """A plain umount comes back before the daemon has ended; two mounts may be started together."""
    data = write(mounted, "default/a")
    subprocess.run(["umount", mounted.mnt], check=True)
    both = [
        subprocess.Popen([AOF2, "mount", "--conf", mounted.conf], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    said = [process.communicate(timeout=DEADLINE_S)[0].split()[:1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sorted(said) == [["already"], ["mounted"]]
    assert (mounted.mnt / "default/a").read_bytes() == data


def test_foreground(machine: Machine) -> None:
    env = {**os.environ, "AOF2_CONF": str(machine.conf)}
    log = machine.root / "log"
    with log.open("wb") as out:
        process = subprocess.Popen([AOF2, "mount", "-f"], env=env, stdout=out, stderr=out, cwd=machine.root)
    try:
        wait_for(lambda: b'"mounted"' in log.read_bytes())
        assert machine.pid() == process.pid
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        if process.poll() is None:
            process.kill()
    assert not machine.is_mounted()


@pytest.mark.parametrize("wait", [True, False])
def test_umount_while_the_remote_is_away(mounted: Machine, wait: bool) -> None:
    """A directory remote is away when its disk is not mounted: here, when its folder cannot be written to."""
    mounted.aof2("checkpoint", "--wait")
    remote = mounted.root / "remote"
    subprocess.run(["mount", "--bind", remote, remote], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", remote], check=True)
        write(mounted, "default/a")
        if wait:
            said = mounted.aof2("umount", fails=1)
            assert "--no-wait" in said or "upload failed" in said
            assert mounted.is_mounted()
        mounted.aof2("umount", "--no-wait")
        assert not mounted.is_mounted()
    finally:
        subprocess.run(["umount", remote], check=True)
    mounted.aof2("mount")
    mounted.aof2("wait", "default/a")
    assert (mounted.mnt / "default/a").read_bytes() == content("default/a")


# -- the verbs -----------------------------------------------------------------------------------------------------


def test_status_knows_what_is_not_sealed(mounted: Machine) -> None:
    with open(mounted.mnt / "default/a", "wb", buffering=0) as writer:
        writer.write(b"x" * 100_000)
        found = mounted.json("status")
        assert found["live"]
        assert found["mount"]["open_files"] == 1
        assert 100_000 <= found["mount"]["unsealed_bytes"] < 104_096  # in whole pages
        assert found["dirty_bytes"] == 100_000
        assert isinstance(found["mount"]["passthrough"], bool)
        assert found["mount"]["transport"].startswith(("io_uring, ", "read: "))
        one = mounted.json("status", mounted.mnt / "default/a")
        assert (one["open"], one["durable"], one["size"]) == (True, False, 100_000)
        assert "still open for writing" in mounted.aof2("wait", "mnt/default/a", fails=1)
    mounted.aof2("wait", "mnt/default/a")
    one = mounted.json("status", "mnt/default/a")
    assert (one["open"], one["durable"]) == (False, True)
    assert mounted.json("status", "mnt/default")["durable"]
    assert json.loads((mounted.mnt / ".aof2/status.json").read_bytes())["mount"]["mountpoint"] == str(mounted.mnt)
    assert "passthrough" in mounted.aof2("status")
    assert "transport" in mounted.aof2("status")
    assert "no such file" in mounted.aof2("status", "mnt/default/no", fails=1)
    assert "not below the mountpoint" in mounted.aof2("status", "/etc", fails=1)


def test_evict_and_warm(mounted: Machine) -> None:
    data = {name: write(mounted, name) for name in ("default/a", "default/d/b", "default/d/c")}
    total = sum(map(len, data.values()))
    gone = mounted.json("evict", "mnt/default")
    assert (gone["files"], gone["skipped"]) == (3, [])
    assert gone["bytes"] >= total
    assert mounted.json("status", "mnt/default")["hot_bytes"] == 0
    cache = mounted.state / "hot_cache" / "default"
    assert not [file for file in cache.iterdir() if file.stat().st_size]  # those made ahead of births are empty
    done = mounted.run("warm", "--check", "mnt/default")
    assert (done.returncode, done.stdout.splitlines()[0]) == (1, "files\t0 of 3 wholly here")
    for name, wanted in data.items():
        assert (mounted.mnt / name).read_bytes() == wanted
    mounted.aof2("evict", "mnt")
    assert mounted.json("warm", "mnt/default")["bytes"] == total
    assert mounted.json("warm", "--check", "mnt/default")["local_bytes"] == total
    for name, wanted in data.items():
        assert (mounted.mnt / name).read_bytes() == wanted


def test_evict_skips_what_is_open_and_what_is_pinned(mounted: Machine) -> None:
    write(mounted, "default/open")
    write(mounted, "default/pinned")
    mounted.aof2("pin", "mnt/default/pinned")
    with open(mounted.mnt / "default/open", "rb"):
        done = mounted.run("evict", "mnt/default")
    assert done.returncode == 1
    assert f"skipped {mounted.mnt}/default/open: open" in done.stderr
    assert f"skipped {mounted.mnt}/default/pinned: pinned" in done.stderr
    assert mounted.json("status", "mnt/default/pinned")["pinned"]
    mounted.aof2("umount")
    mounted.aof2("mount")
    assert mounted.json("status")["mount"]["pinned_files"] == 1
    mounted.aof2("unpin", "mnt")
    assert mounted.json("evict", "mnt")["skipped"] == []


def test_undelete(mounted: Machine) -> None:
    data = write(mounted, "default/d/a")
    mounted.aof2("wait", "mnt/default/d/a")
    path = mounted.mnt / "default/d/a"
    path.unlink()
    assert not path.exists()  # the kernel remembers that there is none
    back = mounted.json("undelete", path)
    assert (back["path"], back["size"]) == (str(path), len(data))
    assert path.read_bytes() == data
    assert "there is a file of that name" in mounted.aof2("undelete", path, fails=1)
    assert "nothing of that name" in mounted.aof2("undelete", "mnt/default/no", fails=1)


def test_verbs_that_only_read_work_while_mounted(mounted: Machine) -> None:
    write(mounted, "default/a")
    mounted.aof2("wait", "mnt/default/a")
    mounted.aof2("evict", "mnt/default/a")
    steps = [step["event"] for step in mounted.json("why", "mnt/default/a")["steps"]]
    assert "UploadDone" in steps
    assert steps[-1] == "LocalEvicted"
    assert "(mounted)" in mounted.aof2("verify")
    assert "clean" in mounted.aof2("verify", "mnt/default/a", "--remote")
    assert mounted.json("manifest", "verify")["clean"]
    assert "LocalEvicted" in mounted.aof2("manifest", "inspect", "default")
    frame = json.loads(mounted.aof2("top", "--once", "--json"))
    assert frame["mount"]["evictions"] == 1
    assert "passthrough" in mounted.aof2("top", "--once")
    lines = (mounted.mnt / ".aof2/manifest/default.jsonl").read_bytes().splitlines()
    assert "LocalEvicted" in {json.loads(line)["type"] for line in lines}
    assert b"aof2_dirty_bytes 0" in (mounted.mnt / ".aof2/metrics").read_bytes()
    mounted.aof2("umount")
    assert "clean" in mounted.aof2("verify", "--remote")
    # Whatever is left of the log on this disk, the remote has what came before.
    found = mounted.json("why", "mnt/default/a")
    assert ([step["event"] for step in found["steps"]], found["earlier_records"]) == (steps, 0)


def test_verbs_without_a_daemon(machine: Machine) -> None:
    for verb in ("warm", "evict", "pin", "unpin", "wait", "undelete"):
        assert machine.aof2(verb, "default/a", fails=1) == "aof2: not mounted; run aof2 mount"
    for args in (["checkpoint"], ["top", "--once"]):
        assert machine.aof2(*args, fails=1) == "aof2: not mounted; run aof2 mount"


def test_a_read_only_mount(mounted: Machine) -> None:
    data = write(mounted, "default/a")
    mounted.aof2("umount")
    mounted.aof2("mount", "-o", "ro")
    assert (mounted.mnt / "default/a").read_bytes() == data
    with pytest.raises(OSError, match="Read-only"):
        (mounted.mnt / "default/b").write_bytes(b"")
    assert mounted.json("status")["mount"]["read_only"]
    mounted.aof2("evict", "mnt")
    assert (mounted.mnt / "default/a").read_bytes() == data


def test_work_inside_the_mount(mounted: Machine) -> None:
    """Relative paths, from a folder of the mount."""
    write(mounted, "default/d/a")
    assert mounted.json("status", "mnt/default/d")["objects"] == 1
    out = mounted.aof2("status", "a", cwd=mounted.mnt / "default/d")
    assert "default/d/a" in out
    mounted.aof2("wait", ".", cwd=mounted.mnt / "default/d")


# -- mount(8) and fsck(8) ------------------------------------------------------------------------------------------

# In a mount namespace of its own, so that /sbin of this machine stays as it is.
AS_SYSTEM = """
set -eu
mount -t overlay -o lowerdir={root}/sbin:/usr/sbin overlay /usr/sbin
mkdir -p {mnt}
echo "aof2 {mnt} fuse.aof2 conf={conf},_netdev,nofail 0 0" > {root}/fstab
mount -T {root}/fstab {mnt}
echo through fstab > {mnt}/default/a
mount -t aof2 aof2 {mnt} -o conf={conf}     # again: harmless
{aof2} umount --conf {conf}
mount -t aof2 aof2 {mnt} -o conf={conf},ro
cat {mnt}/default/a
if mount -t aof2 aof2 {mnt} -o conf=/nonexistent; then exit 9; fi
umount {mnt}
while ! flock -n {state} true; do sleep 0.1; done
fsck -t aof2 {conf}
fsck -t aof2 -a {conf}
if fsck.aof2 -x; then exit 9; else test $? = 16; fi
umount /usr/sbin
mount -t overlay -o lowerdir={root}/usr/local/bin:/usr/local/bin overlay /usr/local/bin
mount.fuse3 aof2 {mnt} -t fuse.aof2 -o conf={conf},rw      # without a helper of ours: it runs `aof2 aof2 {mnt} -o …`
cat {mnt}/default/a
{aof2} umount --conf {conf}
"""


@pytest.mark.skipif(not all(map(shutil.which, ("unshare", "fsck", "mount.fuse3"))), reason="util-linux and fuse3")
def test_mount_and_fsck_of_the_system(machine: Machine) -> None:
    root = machine.root / "root"
    said = machine.aof2("install-helpers", "--root", root)
    assert f"wrote {root}/sbin/mount.aof2" in said
    assert "kept" in machine.aof2("install-helpers", "--root", root)
    where = {"root": root, "mnt": machine.mnt, "conf": machine.conf, "state": machine.state, "aof2": AOF2}
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", AS_SYSTEM.format(**where)],
        capture_output=True, text=True, timeout=DEADLINE_S, cwd=machine.root, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert done.stdout.count("through fstab\n") == 2
    assert done.stdout.count("clean") == 2
    assert "aof2: /nonexistent: no such file" in done.stderr


def test_install_helpers_says_and_writes_nothing_on_a_dry_run(machine: Machine) -> None:
    root = machine.root / "root"
    assert f"would write {root}/sbin/fsck.aof2" in machine.aof2("install-helpers", "--root", root, "--dry-run")
    assert not root.exists()
    assert machine.json("install-helpers", "--root", root)["program"] == AOF2
    unit = (root / "etc/systemd/system/aof2.service").read_text()
    assert f"ExecStart={AOF2} mount -f" in unit
    assert "@" not in unit
    other = root / "usr/local/bin/aof2"
    other.unlink()
    other.write_text("mine")
    assert "left alone" in machine.aof2("install-helpers", "--root", root)
    assert other.read_text() == "mine"
