"""`aof2 mount` and `aof2 umount`, and how mount(8) calls the first."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click
import msgspec

from aof2.engine.catalog.store import View
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error
from aof2.engine.follow.mark import load_mark
from aof2.engine.inspect.left import left_here
from aof2.engine.inspect.rows import MANIFEST_DIR, NoVolumeError, open_rows, tenant_names
from aof2.engine.replicate.tail import positions_of
from aof2.engine.settings import Settings
from aof2.engine.settings.loader import find_conf, load_settings
from aof2.engine.units import format_size
from aof2.fs import mountpoint as mp
from aof2.fs.cli import output
from aof2.fs.cli.conf import volume_options
from aof2.fs.cli.errors import CliError, complain
from aof2.fs.cli.progress import PLAIN_PROGRESS_S, shown_progress
from aof2.fs.control.client import ControlClient, NotMountedError, see_to_the_end
from aof2.fs.launch import LOG_NAME, LaunchError, daemonise, foreground, last_message, prepare, serving, where_mounted
from aof2.fs.options import Options, parse_options
from aof2.fs.privileges import check_folders, check_privileges

# A daemon that was unmounted seals, snapshots and sends the end of its log; the remote may keep it up to its timeout.
END_MAX_S = 60.0


def mount_settings(conf: str | None, options: Options, mountpoint: str | None) -> Settings:
    """The conf's settings with the mountpoint given, if one was."""
    named = conf or (str(options.conf) if options.conf else None)
    place = Path(os.path.abspath(mountpoint)) if mountpoint else None  # noqa: PTH100
    return load_settings(find_conf(named), mountpoint=place)


@click.command(epilog="Example: aof2 mount /aof2 -o allow_other,conf=/etc/aof2/mount.conf")
@click.argument("mountpoint", metavar="[MOUNTPOINT]", required=False)
@click.option("-f", "--foreground", "in_foreground", is_flag=True, help="Stay; log to stderr; tell systemd when ready.")
@click.option(
    "-o", "options", metavar="OPT,…", multiple=True, help="ro, follow, allow_other, uid=, gid=, umask=, nopassthrough …"
)
@click.option(
    "--take", is_flag=True, help="Become the writer of a volume that this state_dir followed; its writer is fenced."
)
@click.option("--fake", is_flag=True, hidden=True)  # mount -f: everything but the mount
@click.option("--quiet", is_flag=True, hidden=True)  # mount(8) says nothing unless -v
@volume_options("One JSON object once it is mounted.")
def mount(
    mountpoint: str | None,
    in_foreground: bool,
    options: tuple[str, ...],
    take: bool,
    fake: bool,
    quiet: bool,
    as_json: bool,
    conf: str | None,
) -> None:
    """Mount the volume, at MOUNTPOINT or where the conf says.

    With -o follow the volume is mounted read-only, as its writer on another machine leaves it in the remote; the
    state_dir is one of its own. Mounted without that, once the writer has left, it becomes the writer's.

    Comes back once the mount answers; the daemon goes on, with its log in state_dir/daemon.log. A volume that is
    already mounted is left as it is; a mount whose daemon died is cleared away first.
    """
    parsed = parse_options(options)
    if take and parsed.follow:
        raise CliError("--take makes this machine the volume's writer, -o follow does not: give one of them")
    parsed = msgspec.structs.replace(parsed, take=take)
    settings = mount_settings(conf, parsed, mountpoint)
    if fake:
        return
    check_folders(settings)
    fresh = prepare(settings)
    if fresh:
        check_privileges(parsed)
    if fresh and in_foreground:
        foreground(settings, parsed)
        return
    if fresh:
        fresh = _daemonise(settings, parsed)
    if quiet:
        return
    if as_json:
        where = settings.volume
        output.print_json(
            {"mountpoint": str(where.mountpoint), "state_dir": str(where.state_dir), "already": not fresh}
        )
    elif not fresh:
        output.print_line(f"already mounted at {settings.volume.mountpoint}")
    else:
        _say_mounted(settings, parsed)


def _daemonise(settings: Settings, options: Options) -> bool:
    """False when another mount of the same volume was quicker."""
    try:
        daemonise(settings, options)
    except LaunchError:
        if where_mounted(settings) != settings.volume.mountpoint:
            raise
        return False
    return True


def _say_mounted(settings: Settings, options: Options) -> None:
    at, tenants = settings.volume.mountpoint, settings.tenants
    if options.follow:
        output.print_line(f"mounted at {at}, read-only: it follows the volume in {settings.remote.url}")
        output.print_line("what to try next: aof2 status, which says how far it is; aof2 warm PATH")
        return
    first = next(iter(tenants), "default")
    output.print_line(f"mounted at {at}: {', '.join(tenants)}")
    output.print_line("what to try next:")
    tips = (
        (f"cp FILE {at}/{first}/", "it is in the remote soon after it is closed"),
        (f"aof2 status {at}/{first}/FILE", "where its bytes are, and whether it is durable"),
        ("aof2 top", "what the volume is doing, live"),
        ("aof2 umount", "uploads what is left, then unmounts"),
    )
    width = max(len(command) for command, _ in tips)
    for command, what in tips:
        output.print_line(f"  {command:<{width}}  {what}")


# -- umount --------------------------------------------------------------------------------------------------------


@click.command(epilog="Example: aof2 umount /aof2")
@click.argument("mountpoint", metavar="[MOUNTPOINT]", required=False)
@click.option("--no-wait", is_flag=True, help="Do not wait for uploads; they go on at the next mount.")
@volume_options("One JSON object once it is unmounted.")
def umount(mountpoint: str | None, no_wait: bool, as_json: bool, conf: str | None) -> None:
    """Upload what is not in the remote yet, unmount, and wait until the daemon has ended.

    A mount that is in use is left mounted, and so is one whose remote does not answer, unless --no-wait says not to
    wait for it. Ends with 0 only when nothing is left that the remote does not have; else it says what that is.
    Nothing is lost either way: it is in state_dir, and uploaded after the next mount.
    """
    settings = mount_settings(conf, Options(), mountpoint)
    at = settings.volume.mountpoint
    elsewhere = serving(settings)
    if elsewhere is not None and elsewhere != at:
        if mountpoint:
            raise CliError(f"{at}: this volume is mounted at {elsewhere}, not there")
        settings = mount_settings(conf, Options(), str(elsewhere))
        at = elsewhere
    uploaded = {"files": 0, "bytes": 0}
    try:
        with ControlClient(settings) as client:
            uploaded = _unmount_served(settings, client, wait=not no_wait)
        said = f"unmounted {at}"
    except NotMountedError as e:
        said = _unmount_dead(settings, e)
        no_wait = False
    _say_left(settings, said, wait=not no_wait)
    output.print_done({"mountpoint": str(at), "said": said, "uploaded": uploaded}, said, as_json=as_json)


def _unmount_served(settings: Settings, client: ControlClient, *, wait: bool) -> dict[str, int]:
    at = settings.volume.mountpoint
    client.watch_daemon()
    mp.check_idle(at)
    with shown_progress() as show:
        uploaded: dict[str, int] = client.call("flush", show, wait=wait)
    mp.unmount(at)
    see_to_the_end(settings)
    _wait_ended(settings, client)
    return uploaded


def _wait_ended(settings: Settings, client: ControlClient) -> None:
    """Until the daemon has ended; says now and then what it does meanwhile."""
    log = settings.volume.state_dir / LOG_NAME
    until_s = time.monotonic() + END_MAX_S + settings.remote.timeout_s
    while not client.wait_ended(PLAIN_PROGRESS_S):
        doing = last_message(log)
        if time.monotonic() > until_s:
            at = settings.volume.mountpoint
            raise CliError(f"{at}: unmounted, but its daemon has not ended yet ({doing}); see {log}")
        complain(f"waiting for the daemon to end: {doing}")


def _say_left(settings: Settings, said: str, *, wait: bool) -> None:
    """Whatever happened: it went well only when nothing is left. Not to wait for uploads was the user's own wish."""
    left, unsealed = _left_behind(settings)
    if left and (wait or unsealed):
        raise CliError(f"{said}, but {left}")
    if left:
        complain(f"note: {left}")


def _left_behind(settings: Settings) -> tuple[str, bool]:
    """What is left and where it stays, "" when nothing is; and whether some of it is not even sealed. Read from
    state_dir once the daemon has ended, whatever ended it: files that only this machine has, and the part of the log
    that the remote does not have."""
    state_dir = settings.volume.state_dir
    if load_mark(state_dir) is not None:
        return "", False  # a follower has nothing that the remote has not
    try:
        with open_rows(state_dir) as rows, rows.view() as view:
            files, unsealed = _left_files(view, settings)
            log = _left_log(view, settings)
    except NoVolumeError:
        return "", False
    except (Aof2Error, OSError) as e:
        return f"what is left in {state_dir} cannot be told: {e}", True
    if not files and not log:
        return "", False
    what = "; and ".join(filter(None, (files, log)))
    return f"{what}. They stay in {state_dir} and are uploaded after the next mount", unsealed


def _left_files(view: View, settings: Settings) -> tuple[str, bool]:
    left = left_here(view, settings.volume.state_dir)
    if not left:
        return "", False
    unsealed = f" ({left.unsealed} of them not sealed)" if left.unsealed else ""
    what = f"{left.files} file(s){unsealed}, {format_size(left.bytes)}, are not in the remote: {left.names()}"
    return what, bool(left.unsealed)


def _left_log(view: View, settings: Settings) -> str:
    lags = positions_of(Env(), view, settings.volume.state_dir / MANIFEST_DIR).lags(tenant_names(view))
    records = sum(one.lag_records for one in lags)
    if not records:
        return ""
    names = ", ".join(one.tenant or "the volume's own" for one in lags if one.lag_records)
    return f"{records} record(s) of the log ({names}) are not in the remote"


def _unmount_dead(settings: Settings, error: NotMountedError) -> str:
    """No daemon answers for the volume: a dead mount is cleared, anything else is not ours."""
    at = settings.volume.mountpoint
    entry = mp.mounted_at(at)
    if entry is None:
        return f"{at} is not mounted"
    if entry.fstype != mp.FSTYPE:
        raise CliError(f"{at}: {entry.fstype} of {entry.source} is mounted there, not aof2; use umount")
    if mp.ask(at) is mp.Answer.LIVE:
        raise CliError(f"{at}: its daemon does not answer on {settings.volume.state_dir}: {error}")
    mp.detach(at)
    return f"cleared {at}: its daemon was gone"


# -- mount(8) ------------------------------------------------------------------------------------------------------


def as_mount_helper(args: list[str]) -> list[str] | None:
    """What `aof2 mount` gets when mount(8) or mount.fuse3 calls: `[SPEC] MOUNTPOINT [-sfnv] [-o OPTS] [-t TYPE]`.

    None when it is not they: they give an absolute mountpoint, after which come only options.
    """
    names: list[str] = []
    while args and not args[0].startswith("-"):
        names.append(args[0])
        args = args[1:]
    if not 1 <= len(names) <= 2 or not names[-1].startswith("/"):
        return None
    options: list[str] = [] if "-v" in args else ["--quiet"]
    rest = iter(args)
    for arg in rest:
        if arg in ("-o", "-t", "-N"):
            value = next(rest, None)
            if value is None:
                return None
            options += ["-o", value] if arg == "-o" else []
        elif arg.startswith("-o"):
            options += ["-o", arg[2:]]
        elif not (arg.startswith("-") and set(arg[1:]) <= set("sfnv")):
            return None
        elif "f" in arg:
            options.append("--fake")
    return ["mount", *options, "--", names[-1]]
