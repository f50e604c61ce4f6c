"""How facts are printed: JSON for scripts, tab-separated lines into pipes, tables on a terminal.

Everything streams: no function here keeps more than a page of rows. Rich is loaded for a terminal only, and leaves
colours out when NO_COLOR is set.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from aof2.fs.wording import one_line

T = TypeVar("T")

PAGE_ROWS = 200


class Column(NamedTuple):
    """A column of a terminal table: as wide as its cells, or folding within what is left, at least `fold_min` wide."""

    title: str
    right: bool = False
    fold_min: int = 0


class Styled(NamedTuple):
    """A row of a terminal table and the style of the whole of it."""

    cells: Sequence[str]
    style: str = ""


def on_terminal() -> bool:
    return sys.stdout.isatty()


def print_json(value: object) -> None:
    """One object, one line. Names that are not UTF-8 are spelled with surrogate escapes."""
    try:
        line = msgspec.json.encode(value)
    except UnicodeEncodeError:
        line = json.dumps(msgspec.to_builtins(value), ensure_ascii=True).encode()
    sys.stdout.buffer.write(line + b"\n")


def print_line(text: str) -> None:
    sys.stdout.buffer.write(text.encode(errors="backslashreplace") + b"\n")


def print_tsv(cells: Iterable[object]) -> None:
    """One line; nothing in a cell can end it or the cell."""
    print_line("\t".join(one_line(str(cell)) for cell in cells))


def print_table(columns: Sequence[Column], rows: Iterable[Styled]) -> None:
    """A table a page at a time. Columns only ever grow from page to page, and nothing is cut off to fit a screen."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    widths = [c.fold_min or len(c.title) for c in columns]
    rows = iter(rows)
    first = True
    while page := [Styled([one_line(cell) for cell in r.cells], r.style) for r in itertools.islice(rows, PAGE_ROWS)]:
        table = Table(box=None, show_header=first, pad_edge=False, header_style="bold", expand=True)
        for i, c in enumerate(columns):
            if c.fold_min:
                table.add_column(c.title, ratio=1, min_width=c.fold_min, overflow="fold")
                continue
            widths[i] = max(widths[i], *(len(row.cells[i]) for row in page))
            table.add_column(c.title, width=widths[i], no_wrap=True, justify="right" if c.right else "left")
        for row in page:
            table.add_row(*(Text(cell, style=row.style) for cell in row.cells))
        console.width = max(console.width, sum(widths) + 2 * len(widths))
        console.print(table)
        first = False


def print_found(
    found: Sequence[T],
    columns: Sequence[str],
    cells: Callable[[T], Sequence[str]],
    *,
    as_json: bool = False,
    folding: Mapping[str, int] | None = None,
    style: Callable[[T], str] = lambda _: "",
) -> None:
    """A JSON object a line for scripts, a table on a terminal, tab-separated lines with a heading elsewhere.
    `folding`: columns that may fold, and how narrow."""
    if as_json:
        for one in found:
            print_json(one)
    elif on_terminal():
        titles = [Column(title, fold_min=(folding or {}).get(title, 0)) for title in columns]
        print_table(titles, [Styled(cells(one), style(one)) for one in found])
    else:
        print_tsv(columns)
        for one in found:
            print_tsv(cells(one))


def print_done(done: object, line: str, *, as_json: bool) -> None:
    """What a verb did: one JSON object, or a sentence."""
    if as_json:
        print_json(done)
    else:
        print_line(line)


def print_report(report: object, facts: Sequence[tuple[str, str]], *, as_json: bool) -> None:
    """What a verb found: one JSON object, or names and values."""
    if as_json:
        print_json(report)
    else:
        print_facts(facts)


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Names and values: aligned on a terminal, tab-separated elsewhere."""
    if not on_terminal():
        for fact in facts:
            print_tsv(fact)
        return
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print_line(f"{name:<{width}}  {one_line(value)}")
