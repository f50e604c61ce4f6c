"""Where failures become what a user sees: one line on stderr (what, where, what to do) and an exit code.

0 done, 1 failed or damaged, 2 usage (click's own), 130 interrupted, 141 the reader of our output went away. Anything
else that escapes is a bug and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import click
import lmdb

from aof2.engine.errors import Aof2Error
from aof2.fs.wording import explain, one_line

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class CliError(Aof2Error):
    """A verb cannot do what it was asked; the message is the whole line."""


def fail_if(failed: object) -> None:
    """Ends the verb with exit code 1; it has said why."""
    if failed:
        raise click.exceptions.Exit(EXIT_FAILED)


def complain(message: str) -> None:
    """One line on stderr, whatever the message holds, after everything printed before it."""
    sys.stdout.flush()
    click.echo(f"aof2: {one_line(message)}", err=True)


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Runs a verb. Output is flushed inside it, so that a closed pipe is met here and not at the interpreter's end."""
    if sys.stdout is None:  # started with it closed
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        yield
        sys.stdout.flush()
    except click.exceptions.Exit:
        _flush_or_leave()
        raise
    except BrokenPipeError:
        _leave_pipe()
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    except (Aof2Error, OSError, lmdb.Error) as e:
        _flush_or_leave()
        complain(explain(e))
        raise SystemExit(EXIT_FAILED) from None


def _flush_or_leave() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _leave_pipe()
    except OSError as e:
        _drop_output()
        complain(f"standard output: {explain(e)}")
        raise SystemExit(EXIT_FAILED) from None


def _leave_pipe() -> None:
    _drop_output()
    raise SystemExit(EXIT_BROKEN_PIPE) from None


def _drop_output() -> None:
    """What is still buffered has nowhere to go; without this the interpreter complains about it on its way out."""
    with contextlib.suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
