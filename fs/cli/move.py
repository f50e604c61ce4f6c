"""`aof2 warm`, `evict`, `pin` and `unpin`: where data is, and what stays. The mounted daemon does the work."""

from __future__ import annotations

from typing import Any

import click

from aof2.fs.cli import output
from aof2.fs.cli.client import ask, in_mount, served
from aof2.fs.cli.conf import load_conf, volume_options
from aof2.fs.cli.errors import complain, fail_if
from aof2.fs.wording import human_size

PATHS = click.argument("paths", metavar="PATH…", nargs=-1, required=True)


def _do(verb: str, paths: tuple[str, ...], conf: str | None) -> Any:
    settings = served(load_conf(conf))
    return ask(settings, verb, paths=in_mount(settings, paths))


def _finish(answer: Any, as_json: bool, said: str, *, fails: bool) -> None:
    """Prints what was done and what was skipped; exit code 1 where something was that should not have been."""
    output.print_done(answer, said.format(files=answer["files"], bytes=human_size(answer["bytes"])), as_json=as_json)
    if not as_json:
        for one in answer["skipped"]:
            complain(f"skipped {one['path']}: {one['why']}")
        if more := answer["skipped_files"] - len(answer["skipped"]):
            complain(f"skipped {more} more")
    fail_if(fails and answer["skipped_files"])


@click.command(epilog="Example: aof2 warm /aof2/default/2024 --check")
@PATHS
@click.option("--check", is_flag=True, help="Fetch nothing: say how much is here. Exit code 1: not all of it.")
@volume_options("One JSON object.")
def warm(paths: tuple[str, ...], check: bool, as_json: bool, conf: str | None) -> None:
    """Bring files to this disk, so that reading them does not wait for the remote.

    PATHs are in the mount, or TENANT/…; a directory is everything below it. What cannot be fetched is named, and the
    exit code is 1.
    """
    if not check:
        answer = _do("warm", paths, conf)
        _finish(answer, as_json, "{files} file(s) are here, {bytes} fetched", fails=True)
        return
    answer = _do("resident", paths, conf)
    facts = [
        ("files", f"{answer['local_files']} of {answer['files']} wholly here"),
        ("bytes", f"{human_size(answer['local_bytes'])} of {human_size(answer['bytes'])} here"),
    ]
    output.print_report(answer, facts, as_json=as_json)
    fail_if(answer["local_bytes"] != answer["bytes"])


@click.command(epilog="Example: aof2 evict /aof2/default/2019")
@PATHS
@volume_options("One JSON object.")
def evict(paths: tuple[str, ...], as_json: bool, conf: str | None) -> None:
    """Drop every local copy: memory, hot, warm and the kernel's pages. The remote keeps the files.

    What is not in the remote yet is uploaded first. Files that are open or pinned are skipped and named, and the exit
    code is 1.
    """
    _finish(_do("evict", paths, conf), as_json, "{files} file(s) evicted, {bytes} freed", fails=True)


@click.command(epilog="Example: aof2 pin /aof2/default/models")
@PATHS
@volume_options("One JSON object.")
def pin(paths: tuple[str, ...], as_json: bool, conf: str | None) -> None:
    """Keep files on this disk: they are brought here and never evicted, also after a restart.

    Of a directory, the files that are below it now. A pin stays with the file when it is renamed or rewritten.
    """
    _finish(_do("pin", paths, conf), as_json, "{files} file(s) pinned, {bytes} fetched", fails=True)


@click.command(epilog="Example: aof2 unpin /aof2/default/models")
@PATHS
@volume_options("One JSON object.")
def unpin(paths: tuple[str, ...], as_json: bool, conf: str | None) -> None:
    """Let pinned files be evicted again, when room is needed or when they are told to."""
    _finish(_do("unpin", paths, conf), as_json, "{files} file(s) unpinned", fails=False)
