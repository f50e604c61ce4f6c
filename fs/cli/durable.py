"""`aof2 checkpoint`, `wait` and `undelete`: what is in the remote, and what comes back from it."""

from __future__ import annotations

import click

from aof2.fs.cli import output
from aof2.fs.cli.client import ask, in_mount, served
from aof2.fs.cli.conf import load_conf, volume_options
from aof2.fs.wording import human_size


@click.command(epilog="Example: aof2 checkpoint default --wait")
@click.argument("tenant", metavar="[TENANT]", required=False)
@click.option("--wait", is_flag=True, help="Come back when all of it is in the remote.")
@volume_options("One JSON object.")
def checkpoint(tenant: str | None, wait: bool, as_json: bool, conf: str | None) -> None:
    """Send what is not in the remote yet on its way: of TENANT, or of all.

    Files that are open for writing are not part of it. It is never needed: what is closed is uploaded by itself.
    """
    done = ask(load_conf(conf), "checkpoint", tenant=tenant, wait=wait)
    amount = f"{done['files']} file(s), {human_size(done['bytes'])}"
    said = f"{amount} in the remote now" if wait else f"{amount} on their way to the remote"
    output.print_done(done, said if done["files"] else "everything that is closed is in the remote", as_json=as_json)


@click.command(epilog="Example: aof2 wait /aof2/default/big.parquet")
@click.argument("paths", metavar="PATH…", nargs=-1, required=True)
@volume_options("One JSON object.")
def wait(paths: tuple[str, ...], as_json: bool, conf: str | None) -> None:
    """Wait until files are in the remote, all of them and all of their bytes.

    Exit code 0 means durable. A file that is still open for writing, or a remote that does not answer, is an error: it
    is named, and the exit code is 1.
    """
    settings = served(load_conf(conf))
    done = ask(settings, "wait", paths=in_mount(settings, paths))
    output.print_done({**done, "durable": True}, "durable: all of it is in the remote", as_json=as_json)


@click.command(epilog="Example: aof2 undelete /aof2/default/report.parquet")
@click.argument("path", metavar="PATH")
@volume_options("One JSON object.")
def undelete(path: str, as_json: bool, conf: str | None) -> None:
    """Bring back the file that had this name and was deleted last.

    As it was in the remote, within retention.undelete_window. Where something has the name now, move that away first.
    """
    settings = served(load_conf(conf))
    back = ask(settings, "undelete", path=in_mount(settings, [path])[0])
    output.print_done(back, f"{back['path']} is back: {back['size']} bytes", as_json=as_json)
