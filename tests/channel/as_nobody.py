"""Run by as_nobody.sh: a mount made by a channel without privileges, read and written through it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.channel.support import PASSTHROUGH, Daemon


def main(folder: Path) -> None:
    (folder / "d" / "root").mkdir(parents=True)
    (folder / "d" / "mnt").mkdir()
    for path in (folder / "d", folder / "d" / "mnt", folder / "d" / "root"):
        os.chmod(path, 0o755)
        os.chown(path, 65534, 65534)
    daemon = Daemon(folder / "d", channel=str(folder / "channel"), uid=65534, gid=65534, uring=True)
    try:
        daemon.call("plan", name="f", mode=PASSTHROUGH)
        daemon.file("f", b"hello")
        print("passthrough", daemon.info["passthrough"], daemon.info["max_write"])
        print("transport", daemon.info["transport"])
        # Without allow_other the mount is its owner's alone.
        nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        print("read", subprocess.run([*nobody, "cat", daemon.mount / "f"], stdout=subprocess.PIPE, timeout=20).stdout)
        print("probe", daemon.call("probe", path=str(folder / "d" / "root" / "f")))
        print("refused", daemon.call("refused"))
        print("ops", daemon.ops("read"))
    finally:
        daemon.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
