"""The mount exported by a real NFS server (nfs-ganesha, which opens files by their handles), read and written by a real
client (libnfs). Both are Debian packages: nfs-ganesha-vfs, libnfs-utils; without them this is skipped."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mount import MountedVolume, mounted_volume, until
from tests.support.seaweed import free_ports

SERVER = shutil.which("ganesha.nfsd", path=f"{os.environ.get('PATH', '')}:/usr/bin:/usr/sbin")
PLUGINS = Path("/usr/lib") / str(sysconfig.get_config_var("MULTIARCH")) / "ganesha"

pytestmark = pytest.mark.skipif(
    SERVER is None or not (PLUGINS / "libfsalvfs.so").exists() or shutil.which("nfs-cat") is None,
    reason="needs nfs-ganesha-vfs and libnfs-utils",
)

CONF = """
NFS_CORE_PARAM {{ NFS_Port = {port}; Protocols = 4; Enable_NLM = false; Enable_RQUOTA = false; Bind_addr = 127.0.0.1;
                  Plugins_Dir = "{plugins}"; }}
NFSv4 {{ Graceless = true; RecoveryBackend = fs; RecoveryRoot = "{root}/recovery"; }}
NFS_KRB5 {{ Active_krb5 = false; }}
EXPORT {{ Export_Id = 1; Filesystem_Id = 7.7; Path = "{path}"; Pseudo = /vol; Access_Type = RW;
          Squash = No_Root_Squash; Protocols = 4; SecType = sys; FSAL {{ Name = VFS; }} }}
"""


@contextlib.contextmanager
def exported(volume: MountedVolume, root: Path) -> Iterator[str]:
    """The tenant over NFS: what a URL of it begins with."""
    [port] = free_ports(1)
    root.mkdir()
    (root / "recovery").mkdir()
    conf = root / "ganesha.conf"
    conf.write_text(CONF.format(port=port, plugins=PLUGINS, root=root, path=volume.path))
    command = [str(SERVER), "-F", "-f", conf, "-L", root / "log", "-p", root / "pid"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            until(lambda: answers(port), "the NFS server does not start", 60.0)
            yield f"nfs://127.0.0.1/vol{{}}?version=4&nfsport={port}"
        finally:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(10)
            server.kill()


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def nfs(tool: str, *args: str | Path) -> bytes:
    done = subprocess.run([tool, *args], capture_output=True, timeout=60, check=False)
    assert not done.returncode and b"ailed" not in done.stderr, done.stderr
    return done.stdout


def test_an_nfs_export(tmp_path: Path) -> None:
    with mounted_volume(tmp_path / "volume", options=["allow_other"]) as volume:
        deep = volume.path / "a" / "b"
        deep.mkdir(parents=True)
        data = random.Random(1).randbytes(2_500_000)
        (deep / "file").write_bytes(data)
        with exported(volume, tmp_path / "nfs") as url:
            assert nfs("nfs-cat", url.format("/a/b/file")) == data
            volume.evict(deep / "file")
            Path("/proc/sys/vm/drop_caches").write_text("2")  # only its handle is known from here on
            assert nfs("nfs-cat", url.format("/a/b/file")) == data
            assert b"file" in nfs("nfs-ls", url.format("/a/b"))
            (tmp_path / "small").write_bytes(b"written over NFS")
            nfs("nfs-cp", tmp_path / "small", url.format("/a/new"))
            assert (volume.path / "a" / "new").read_bytes() == b"written over NFS"
        assert not volume.complaints()
