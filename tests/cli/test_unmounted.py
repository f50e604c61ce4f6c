"""`umount` ends well only when nothing is left that the remote does not have; else it says what, and where it stays."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
from pathlib import Path

from tests.support.mount import MountedVolume, mounted_volume, until

AWAY = {"timeout": "1s", "retries": 0}


def umount(volume: MountedVolume, *args: str) -> tuple[int, str]:
    ran = volume.aof2("umount", *args)
    return ran.returncode, ran.stdout + ran.stderr


def set_conf(volume: MountedVolume, old: str, new: str) -> None:
    text = volume.conf.read_text()
    assert old in text
    volume.conf.write_text(text.replace(old, new))


def ended(volume: MountedVolume) -> None:
    until(lambda: not volume.pids(), "the daemon does not end")


def test_a_daemon_that_died(tmp_path: Path) -> None:
    """Also files that the channel had just created: the catalog has not heard of them."""
    with mounted_volume(tmp_path) as own:
        (own.path / "d").mkdir()
        (own.path / "d" / "just made").write_bytes(b"x" * 100_000)
        own.kill()
        code, said = umount(own)
        assert code == 1
        assert "1 file(s) (1 of them not sealed)" in said
        assert "default/d/just made" in said
        assert str(own.state_dir) in said
        own.remount()
        assert umount(own)[0] == 0
        assert umount(own) == (0, f"{own.mountpoint} is not mounted\n")


def test_a_daemon_that_dies_while_it_is_asked(tmp_path: Path) -> None:
    """What the rows on this disk say is said then."""
    with mounted_volume(tmp_path) as own:
        (own.path / "f").write_bytes(b"x" * 5000)
        own.done("wait", own.path / "f")
        own.umount()
        address = own.state_dir / "control.sock"
        address.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(address))
            listening.listen()

            def hang_up() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        listening.accept()[0].close()

            threading.Thread(target=hang_up, daemon=True).start()
            assert own.json("status", own.path / "f")["durable"]
            assert own.json("status")["tenants"]
            assert own.json("generations", own.path / "f")["generation"] == 1
            own.remount()  # as for one that was killed the moment before
            assert (own.path / "f").stat().st_size == 5000
            listening.shutdown(socket.SHUT_RDWR)


def test_a_volume_that_is_turned_off(tmp_path: Path) -> None:
    with mounted_volume(tmp_path) as own:
        for n in range(8):
            (own.path / f"f{n}").write_bytes(b"x" * 5000)
        own.kill()
        own.aof2("umount")
        set_conf(own, "[metrics]", "[manifest]\nenabled = false\n\n[metrics]")
        own.remount()
        code, said = umount(own)
        assert (code, not own.pids()) == (1, True)
        assert "8 file(s)" in said
        assert "and 3 more" in said
        set_conf(own, "enabled = false", "enabled = true")
        own.remount()
        assert umount(own)[0] == 0


def test_read_only_and_without_waiting(tmp_path: Path) -> None:
    """`-o ro` uploads what was left before; where it cannot, it says so."""
    with mounted_volume(tmp_path, remote=AWAY) as own:
        (own.path / "f").write_bytes(b"x" * 5000)
        own.kill()
        own.aof2("umount")
        own.options = ["ro"]
        blobs = own.remote / "checkpoints"
        blobs.mkdir(exist_ok=True)
        subprocess.run(["mount", "--bind", blobs, blobs], check=True)
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", blobs], check=True)
            own.remount()
            code, said = umount(own)
            assert code == 1
            assert own.pids(), "it was to stay mounted"
            code, said = umount(own, "--no-wait")
            assert code == 0
            assert "note: 1 file(s)" in said
            assert "default/f" in said
        finally:
            subprocess.run(["umount", blobs], check=True)
        own.remount()
        assert umount(own)[0] == 0
        own.options = []
        own.remount()
        own.evict(own.path / "f")
        assert (own.path / "f").read_bytes() == b"x" * 5000


def took_over(own: MountedVolume, other: Path) -> bool:
    """Another machine restores and mounts; not where the writer's log went on in between."""
    shutil.rmtree(own.root / "other", ignore_errors=True)
    restored = own.aof2("restore", "--conf", other, "--from", f"file://{own.remote}")
    assert "default/mine" in restored.stderr
    return own.aof2("mount", "--conf", other).returncode == 0


def test_a_fenced_mount(tmp_path: Path) -> None:
    """Another machine took the volume: this one can be unmounted, and says what only it has."""
    with mounted_volume(tmp_path, remote=AWAY) as own:
        (own.path / "before").write_bytes(b"before")
        other = own.root / "other.conf"
        other.write_text(
            own.conf.read_text().replace(str(own.state_dir), str(own.root / "other")).replace("/mnt", "/mnt2")
        )
        with open(own.path / "mine", "wb") as mine:  # it may notice at any moment, and takes nothing new from then on
            mine.write(b"m" * 5000)
            mine.flush()
            own.done("wait", own.path / "before")
            until(lambda: took_over(own, other), "the writer adds to its log for ever")
            with contextlib.suppress(OSError):
                (own.path / "later").mkdir()  # its log goes on, and may not
            until(lambda: bool(own.ask("status")["mount"]["read_only"]), "it does not notice")
        try:
            code, said = umount(own)
            assert (code, not own.pids()) == (1, True)
            assert "1 file(s)" in said
            assert "default/mine" in said
        finally:
            own.done("umount", "--conf", other)


def test_umount_8_and_a_signal_say_it_in_the_log(tmp_path: Path) -> None:
    with mounted_volume(tmp_path) as own:
        for n, end in enumerate((lambda: subprocess.run(["umount", own.mountpoint], check=True), None)):
            (own.path / f"f{n}").write_bytes(os.urandom(5000))
            if end is None:
                os.kill(own.daemon_pid(), signal.SIGTERM)
            else:
                end()
            ended(own)
            said = [line for line in own.log() if "before everything was in the remote" in line.get("message", "")]
            assert [line["first"] for line in said][-1:] == [[f"default/f{n}"]]
            assert said[-1]["state_dir"] == str(own.state_dir)
            own.remount()
            own.done("wait", own.path)
        assert umount(own)[0] == 0
