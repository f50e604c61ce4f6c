"""`aof2 jobs` and `aof2 gc`: the work that is queued, and letting go of what retention does not keep."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from aof2.engine.catalog.rows import JobState
from aof2.engine.catalog.store import View
from aof2.engine.inspect.jobs import SHORT, JobStatus, every_job, find_job, job_status
from aof2.fs.cli import output
from aof2.fs.cli.client import ask, ask_or_read
from aof2.fs.cli.conf import load_conf, volume_options
from aof2.fs.cli.errors import complain, fail_if
from aof2.fs.cli.records import iso_time
from aof2.fs.wording import human_size

COLUMNS = ("job", "type", "state", "progress", "attempts", "updated (UTC)", "reason")
STATES = [state.name.lower() for state in JobState]
JOB = click.argument("job", metavar="JOB")
WAIT = click.option("--wait", is_flag=True, help="Come back when it is over; exit code 1 when it failed.")


@click.group(invoke_without_command=True, epilog="Example: aof2 jobs list --json")
@volume_options("JSON: of a list, one object a line.")
@click.pass_context
def jobs(ctx: click.Context, as_json: bool, conf: str | None) -> None:
    """The work that is queued, runs, or is over: uploads, verifications, downloads, prunes, truncations.

    Without a command: list. JOB is TENANT/NUMBER, as the list shows it. A failed job stays until it is retried or
    cancelled; of the others that are over, the newest 64 of a tenant are kept.
    """
    if ctx.invoked_subcommand is None:
        _list((), as_json, conf)


@jobs.command("list", epilog="Example: aof2 jobs list --state failed")
@click.option("--state", "states", multiple=True, type=click.Choice(STATES), help="Only those; may be repeated.")
@volume_options("JSON: of a list, one object a line.")
def list_(states: tuple[str, ...], as_json: bool, conf: str | None) -> None:
    """Every job: its type, state, how far it is, and why it failed. Also works while nothing is mounted."""
    _list(states, as_json, conf)


def _list(states: tuple[str, ...], as_json: bool, conf: str | None) -> None:
    found = ask_or_read(load_conf(conf), list[JobStatus], lambda view: list(every_job(view)), "jobs", action="list")
    _table([job for job in found if not states or job.state in states], as_json)


def _table(found: list[JobStatus], as_json: bool) -> None:
    output.print_found(found, COLUMNS, _cells, as_json=as_json, folding={"reason": 30})


def _cells(job: JobStatus) -> tuple[str, ...]:
    return (job.job, job.type, job.state, _far(job), str(job.attempts), iso_time(job.updated_ms), job.reason)


def _far(job: JobStatus) -> str:
    return f"{job.done} of {job.total}" if job.total else ""


@jobs.command(epilog="Example: aof2 jobs show default/12")
@JOB
@volume_options("JSON: of a list, one object a line.")
def show(job: str, as_json: bool, conf: str | None) -> None:
    """One job, with all that is known of it: what it found, when it is tried again, the reason of its failure.

    Also works while nothing is mounted.
    """

    def read(view: View) -> list[JobStatus]:
        _, row, tenant = find_job(view, job)
        return [job_status(row, tenant)]

    [one] = ask_or_read(load_conf(conf), list[JobStatus], read, "jobs", action="show", job=job)
    if as_json:
        output.print_json(one)
        return
    facts = [
        ("job", one.job),
        ("type", one.type),
        ("state", one.state + (", to be cancelled" if one.cancel_requested and one.state == "running" else "")),
        ("progress", _far(one) or "none yet"),
        ("attempts", str(one.attempts)),
        ("created", iso_time(one.created_ms)),
        ("updated", iso_time(one.updated_ms)),
        ("next attempt", iso_time(one.next_ms) if one.next_ms else ""),
        ("reason", f"{one.reason} ({one.reason_code})" if one.reason else ""),
        *((name.replace("_", " "), _text(value)) for name, value in one.report.items()),
    ]
    output.print_facts([(name, value) for name, value in facts if value])


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


@jobs.command(epilog="Example: aof2 jobs retry default/12 --wait")
@click.argument("job", metavar="[JOB]", required=False)
@click.option("--all", "every", is_flag=True, help="Every job that failed or waits for its next attempt.")
@WAIT
@volume_options("JSON: of a list, one object a line.")
def retry(job: str | None, every: bool, wait: bool, as_json: bool, conf: str | None) -> None:
    """Try a failed job again, or one that waits for its next attempt: now."""
    if bool(job) == every:
        raise click.UsageError("name a JOB, or --all of them")
    _ended(ask(load_conf(conf), "jobs", action="retry", job=job or "", wait=wait), as_json, wait)


@jobs.command(epilog="Example: aof2 jobs cancel default/12")
@JOB
@volume_options("JSON: of a list, one object a line.")
def cancel(job: str, as_json: bool, conf: str | None) -> None:
    """Stop a job: at once, or between two of its steps while it runs.

    Files whose upload is cancelled stay here, dirty, and are planned again with the next file that is closed.
    """
    _ended(ask(load_conf(conf), "jobs", action="cancel", job=job), as_json, False)


@jobs.command(epilog="Example: aof2 jobs start verify default --wait")
@click.argument("type_", metavar="TYPE", type=click.Choice(list(SHORT)))
@click.argument("tenant", metavar="[TENANT]", required=False)
@click.option("--checkpoint", metavar="ID", type=click.IntRange(min=1), help="Of verify and download: only this one.")
@WAIT
@volume_options("JSON: of a list, one object a line.")
def start(type_: str, tenant: str | None, checkpoint: int | None, wait: bool, as_json: bool, conf: str | None) -> None:
    """Queue a job of one tenant, or of each.

    \b
    checkpoint  upload what is sealed and not in the remote yet
    verify      fetch every blob again, check it, and rebuild bad ones from good copies on this disk
    download    bring everything to this disk, as far as there is room
    prune       let go of what retention no longer keeps (as aof2 gc)
    rewrite     write packs of small files anew of which too little is in use (as aof2 gc)
    truncate    cut append streams
    """
    args: dict[str, Any] = {"type": type_, "tenant": tenant, "checkpoint_id": checkpoint or 0, "wait": wait}
    _ended(ask(load_conf(conf), "jobs", action="start", **args), as_json, wait)


def _ended(answer: Any, as_json: bool, waited: bool) -> None:
    found = msgspec.convert(answer, list[JobStatus])
    if found or as_json:
        _table(found, as_json)
    else:
        output.print_line("nothing to do")
    failed = [job for job in found if job.state == "failed"] if waited else []
    for job in failed if as_json else ():
        complain(f"{job.job}: {job.reason}")
    fail_if(failed)


# -- gc --------------------------------------------------------------------------------------------------------------

GC_COLUMNS = ("tenant", "generations", "remote objects", "bytes", "later", "later bytes")


@click.command(epilog="Example: aof2 gc --dry-run")
@click.argument("tenant", metavar="[TENANT]", required=False)
@click.option("--dry-run", is_flag=True, help="Change nothing: say how much would go.")
@volume_options("One JSON object a tenant and line.")
def gc(tenant: str | None, dry_run: bool, as_json: bool, conf: str | None) -> None:
    """Let go of what retention no longer keeps: old generations, deleted files, remote objects that nothing needs.

    This happens by itself, too. What lost its last reference less than retention.purge_after ago goes later; those are
    counted apart. Packs of small files of which less than retention.pack_live_share is in use are written anew, and the
    old ones go later as well. Uploads that ended midway are cleared away.
    """
    answer = [{**one, "dry_run": dry_run} for one in ask(load_conf(conf), "gc", tenant=tenant, dry_run=dry_run)]
    output.print_found(answer, GC_COLUMNS, _gc_cells, as_json=as_json)
    if as_json:
        return
    if in_use := sum(one["in_use"] for one in answer):
        complain(f"note: {in_use} generation(s) are in use and stay until the next time")
    if aborted := sum(one["uploads_aborted"] for one in answer):
        complain(f"note: {aborted} upload(s) that ended midway were cleared away")
    if packs := sum(one["sparse_packs"] for one in answer):
        freed = human_size(sum(one["sparse_bytes"] for one in answer))
        complain(f"note: {packs} pack(s) {'would be' if dry_run else 'were'} written anew, which frees {freed} later")


def _gc_cells(one: dict[str, Any]) -> tuple[str, ...]:
    now = (one["tenant"], str(one["generations"]), str(one["blobs"]), human_size(one["bytes"]))
    return (*now, str(one["later_blobs"]), human_size(one["later_bytes"]))
