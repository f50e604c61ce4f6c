"""The `aof2` command. One file a verb group; `output` prints, `errors` turns every failure into a line and a code.

Verbs are listed here by name and imported when they run, so `aof2 --help` loads neither the engine nor rich.
"""

from __future__ import annotations

from importlib.metadata import version

import click

from aof2.fs.cli.errors import reported
from aof2.fs.cli.lazy import Commands, LazyGroup

VERBS: Commands = {
    "bench": ("aof2.fs.cli.bench", "Measure this machine against AOF2's targets."),
    "changes": ("aof2.fs.cli.changes", "What changed, from where a named cursor stands."),
    "checkpoint": ("aof2.fs.cli.durable", "Make dirty data durable in the remote."),
    "deliver": ("aof2.fs.cli.deliver", "Put files into a volume that is not mounted here."),
    "evict": ("aof2.fs.cli.move", "Drop every local copy of files that are in the remote."),
    "gc": ("aof2.fs.cli.jobs", "Let go of what retention no longer keeps."),
    "generations": ("aof2.fs.cli.past", "What can be had of a file: now, and before."),
    "install-helpers": ("aof2.fs.cli.install", "Let mount(8), fsck(8) and systemd find AOF2."),
    "jobs": ("aof2.fs.cli.jobs", "The work that is queued: look at it, start, retry, cancel."),
    "manifest": ("aof2.fs.cli.manifest", "Look at a manifest log, and check it."),
    "mount": ("aof2.fs.cli.mount", "Mount the volume."),
    "pin": ("aof2.fs.cli.move", "Keep files on this disk."),
    "report": ("aof2.fs.cli.report", "The volume's history as a page: tiers, hits, thrash, cost."),
    "restore": ("aof2.fs.cli.restore", "Build state_dir from the remote, on an empty machine."),
    "revert": ("aof2.fs.cli.past", "Bring back what a file was."),
    "seal": ("aof2.fs.cli.stream", "Make files of what is not sealed yet of a stream."),
    "snapshot": ("aof2.fs.cli.snapshot", "Moments of a tenant that are kept."),
    "spark": ("aof2.fs.cli.spark", "Data pipelines on Spark: ingest, compact, verify, manifest."),
    "status": ("aof2.fs.cli.status", "What the volume, a directory or a file is like now."),
    "top": ("aof2.fs.cli.top", "What the mounted volume is doing, live."),
    "truncate": ("aof2.fs.cli.stream", "Remove the beginning of a stream, or what is not sealed."),
    "umount": ("aof2.fs.cli.mount", "Upload what is left, and unmount."),
    "undelete": ("aof2.fs.cli.durable", "Bring back a deleted file."),
    "unpin": ("aof2.fs.cli.move", "Let pinned files go again."),
    "verify": ("aof2.fs.cli.verify", "Check a volume: log, local copies and remote, by content."),
    "wait": ("aof2.fs.cli.durable", "Wait until files are in the remote."),
    "warm": ("aof2.fs.cli.move", "Bring files to this disk."),
    "why": ("aof2.fs.cli.status", "The tier history of a file, from the manifest log."),
}


class Verbs(LazyGroup):
    """The top command: nothing a user can cause leaves it as a traceback."""

    LISTED = VERBS
    HEADING = "Commands"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """mount(8) and mount.fuse3 name no verb: `aof2 [SPEC] MOUNTPOINT -o …`."""
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            from aof2.fs.cli.mount import as_mount_helper

            args = as_mount_helper(args) or args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        with reported():
            return super().invoke(ctx)


@click.command(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: aof2 manifest inspect /var/lib/aof2/manifest/1 --json",
)
@click.version_option(version("aof2"), prog_name="aof2", message="%(prog)s %(version)s")
def main() -> None:
    """A tiered filesystem: memory, a bounded local disk and S3 behind one mount, every movement in a log."""
