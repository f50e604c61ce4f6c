"""The page: figures, tables and words, put together with plotly.js into one file.

Invariants
- The page asks for nothing: script and style are in it, and its Content-Security-Policy lets nothing else in.
- Names of files and directories are text: whatever is in them is shown and never run.

Owner: pure, but for reading the script and the style that are installed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from typing import Any, Final, NamedTuple

from aof2.engine.history.history import History
from aof2.fs.report.charts import figures
from aof2.fs.wording import human_size

POLICY: Final = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
CONFIG: Final = {"displaylogo": False, "responsive": True, "displayModeBar": False}
THRASH_WARN: Final = 0.2


class Waiting(NamedTuple):
    """What is not durable yet."""

    files: int
    bytes: int
    paths: Sequence[str]
    log: Sequence[str]  # a line for each stream whose log is not all in the remote


class Card(NamedTuple):
    name: str
    title: str
    what: str
    wide: bool = False
    tall: bool = False
    nothing: str = "nothing of it in the log"


_NO_OPENS: Final = "no open was noted yet"
_NOT_USED: Final = "nothing was used yet"
_STAYED: Final = "nothing that was evicted came back"
CARDS: Final = (
    Card("tiers", "Bytes per tier", "What was sealed and is on this disk, compressed, and in the remote.", wide=True),
    Card("moves", "Fetched and evicted", "Bytes that came to hot_cache, upwards; bytes that left it, downwards."),
    Card("hits", "Hit rate", "Of the files that were opened, those whose bytes were here.", nothing=_NO_OPENS),
    Card(
        "returns",
        "Came back after",
        "What was evicted and fetched again, by how long it was away. Under ten minutes is thrash.",
        nothing=_STAYED,
    ),
    Card(
        "what-if",
        "Another cache size",
        "The hit rate that hot_bytes of another size would have had, replayed.",
        nothing=_NO_OPENS,
    ),
    Card("directories", "Hottest directories", "Opens, and fetches into hot_cache.", tall=True, nothing=_NOT_USED),
    Card("hours", "By hour", "Opens and fetches by directory, the last week, UTC.", tall=True, nothing=_NOT_USED),
)


def page_of(found: History, waiting: Waiting, volume: str, made_ms: int) -> str:
    """The page, as text."""
    drawn = figures(found)
    cards = "".join(_card(card, card.name in drawn) for card in CARDS)
    style = resources.files("aof2.fs.report").joinpath("page.css").read_text()
    title = f"AOF2: {volume}"
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{style}</style>
<script>{_script()}</script></head>
<body><main>
<header><h1>{escape(volume)}</h1><p>{escape(_span(found, made_ms))}</p></header>
<section class="tiles">{"".join(_tiles(found, waiting))}</section>
<section class="cards">{cards}{_waiting(waiting)}{_returners(found)}{_requests(found)}</section>
{_footer(found)}
</main>
<script>
const figures = {_json(drawn)};
const config = {_json(CONFIG)};
Promise.all(Object.entries(figures).map(([name, f]) => Plotly.newPlot("chart-" + name, f.data, f.layout, config)))
  .then(() => {{ document.body.dataset.drawn = Object.keys(figures).length; }});
</script></body></html>
"""


def _script() -> str:
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return script.replace("</script", "<\\/script")


def _json(value: Any) -> str:
    """Inside a script: nothing in a name can end it."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")


# -- words and numbers


def _when(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M") + " UTC"


def _span(found: History, made_ms: int) -> str:
    if not found.records:
        return f"no history yet · made {_when(made_ms)}"
    whole = "" if found.whole else ", where the history begins: what was before was let go"
    return (
        f"{found.records:,} records from {_when(found.from_ms)}{whole} to {_when(found.to_ms)} · made {_when(made_ms)}"
    )


def _tile(name: str, value: str, more: str = "", *, warn: bool = False) -> str:
    kind = "tile warn" if warn else "tile"
    return (
        f'<div class="{kind}"><div class="name">{escape(name)}</div><div class="value">{escape(value)}</div>'
        f'<div class="more">{escape(more)}</div></div>'
    )


def percent(rate: float | None) -> str:
    return "–" if rate is None else f"{100 * rate:.1f} %"


def _tiles(found: History, waiting: Waiting) -> list[str]:
    m, totals = found.measured, found.totals
    limit = f"of {human_size(m.limit_bytes)}" if m.limit_bytes else "on this disk"
    quick = totals["quick_returns"] / totals["evictions"] if totals["evictions"] else 0.0
    cost = found.cost.put_dollars + found.cost.get_dollars + found.cost.delete_dollars + found.cost.transfer_dollars
    return [
        _tile("Hot", human_size(found.tiers["hot"]), limit),
        _tile("Remote", human_size(found.tiers["remote"]), f"warm: {human_size(found.tiers['warm'])}"),
        _tile("Hit rate", percent(found.hit_rate), f"of {m.uses:,} opens" if m.uses else "no opens noted"),
        _tile("Fetched", human_size(totals["hydrated_bytes"]), f"{totals['misses']:,} fetches from the remote"),
        _tile("Evicted", human_size(totals["evicted_bytes"]), f"{totals['evictions']:,} times"),
        _tile(
            "Thrash",
            percent(quick if totals["evictions"] else None),
            "of evictions undone within 10 min",
            warn=quick > THRASH_WARN,
        ),
        _tile("Not durable yet", human_size(waiting.bytes), f"{waiting.files:,} file(s)", warn=bool(waiting.files)),
        _tile("Requests", f"{found.cost.puts + found.cost.gets:,}", f"about ${cost:,.{2 if cost >= 1 else 4}f}"),
    ]


def _card(card: Card, drawn: bool) -> str:
    kind = "card wide" if card.wide else "card"
    height = "chart tall" if card.tall else "chart"
    inside = f'<div class="{height}" id="chart-{card.name}"></div>'
    if not drawn:
        inside = f'<div class="none">{escape(card.nothing)}</div>'
    head = f'<h2>{escape(card.title)}</h2><p class="what">{escape(card.what)}</p>'
    return f'<article class="{kind}">{head}{inside}</article>'


def _table(
    title: str, what: str, names: Sequence[str], rows: Sequence[Sequence[str]], nothing: str, *, wide: bool = False
) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        last = len(row) - 1
        return "".join(
            f"<{tag}{' class=number' if (at and at == last) or (len(row) > 2 and at) else ''}>{escape(cell)}</{tag}>"
            for at, cell in enumerate(row)
        )

    body = f'<div class="none">{escape(nothing)}</div>'
    if rows:
        lines = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
        body = f"<table><tr>{cells('th', names)}</tr>{lines}</table>"
    kind = "card wide" if wide else "card"
    return f'<article class="{kind}"><h2>{escape(title)}</h2><p class="what">{escape(what)}</p>{body}</article>'


def _waiting(waiting: Waiting) -> str:
    more = waiting.files - len(waiting.paths)
    rows = [[path] for path in waiting.paths] + ([[f"and {more:,} more"]] if more > 0 else [])
    rows += [[line] for line in waiting.log]
    what = f"{waiting.files:,} file(s), {human_size(waiting.bytes)}: only this machine has them."
    return _table("Not durable yet", what, ("name",), rows, "all of it is in the remote", wide=True)


def _returners(found: History) -> str:
    rows = [[one.path, f"{one.returns:,}"] for one in found.returners[:10]]
    what = "Files that were evicted and fetched again most often."
    return _table("Came back most", what, ("file", "times"), rows, "nothing that was evicted came back")


PUTS: Final = {
    "put_blob": "blobs put",
    "put_pack": "packs put",
    "put_log": "log chunks put",
    "put_bundle": "bundles put",
    "put_snapshot": "log snapshots put",
    "put_other": "others put",
    "put_failed": "puts that failed",
}


def _requests(found: History) -> str:
    c = found.cost
    rows = [[text, f"{found.requests[name]:,}", ""] for name, text in PUTS.items() if found.requests.get(name)]
    rows += [
        ["all puts", f"{c.puts:,}", f"${c.put_dollars:,.4f}"],
        ["gets", f"{c.gets:,}", f"${c.get_dollars:,.4f}"],
        ["deletes", f"{c.deletes:,}", f"${c.delete_dollars:,.4f}"],
        ["bytes fetched", human_size(c.fetched_bytes), f"${c.transfer_dollars:,.4f}"],
        ["bytes stored, a month", human_size(c.stored_bytes), f"${c.storage_dollars_a_month:,.4f}"],
    ]
    what = "As far as the log tells, and what they cost by the prices given (S3 Standard's by default)."
    return _table("Requests to the remote", what, ("request", "count", "cost"), rows, "")


def _footer(found: History) -> str:
    lines = [
        "Bytes per tier, movements and requests are the manifest log's own records; bytes count before compression, and"
        " what is not sealed yet is not in them.",
        _basis(found),
        "Gets: one for each chunk that was fetched. A pack's members come together, so there were fewer.",
        *found.notes,
    ]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines if line)
    return f"<footer><h2>What this is based on</h2><ul>{items}</ul></footer>"


def _basis(found: History) -> str:
    m = found.measured
    if not m.uses:
        return "Hit rate: a mount notes about once a minute what was opened; there is no such note in this history."
    share = f" One file in {m.one_in} stands for all of them in the replay." if m.one_in > 1 else ""
    first = found.what_if[0].first_uses if found.what_if else 0
    span = f"{m.uses:,} opens in {m.samples:,} samples from {_when(m.first_ms)} to {_when(m.last_ms)}"
    return (
        f"Hit rate: {span}. Another cache size is a replay of them through the policy in use; the first open of each of"
        f" {first:,} files counts as it was measured.{share}"
    )
