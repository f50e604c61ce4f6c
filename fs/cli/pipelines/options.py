"""Options that several pipelines have, and how their values are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click

from aof2.engine.spark.pipelines.tables import FILE_BYTES, Layout
from aof2.engine.units import format_size, parse_size

F = TypeVar("F", bound=Callable[..., Any])


def layout_options(command: F) -> F:
    """Adds how Parquet is laid out; `layout_of` takes it out of the command's keywords again."""
    by = click.option(
        "--partition-by",
        metavar="COLUMN|NAME=EXPR",
        multiple=True,
        help="Of Parquet: a directory for each value. day=date(timestamp) computes one.",
    )
    size = click.option(
        "--file-bytes",
        metavar="SIZE",
        default=format_size(FILE_BYTES),
        show_default=True,
        help="Of Parquet: about what a file holds, before Parquet makes it smaller.",
    )
    return by(size(command))


def layout_of(how: dict[str, Any]) -> Layout:
    text = how.pop("file_bytes")
    try:
        size = parse_size(text)
    except ValueError as e:
        raise click.BadParameter(f"{text!r}: {e}", param_hint="--file-bytes") from None
    if not size:
        raise click.BadParameter(f"{text!r}: 1 byte at least", param_hint="--file-bytes")
    return Layout(partition_by=tuple(how.pop("partition_by")), file_bytes=size)


def pairs(option: str, texts: Iterable[str]) -> dict[str, str]:
    """KEY=VALUE, each."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{text!r}: it is KEY=VALUE", param_hint=option)
        found[key] = value
    return found


def absolute(path: str) -> str:
    """Tasks run in other directories; a URL is as it is, and so are patterns."""
    return path if urlsplit(path).scheme else str(Path(path).absolute())
