"""A volume's history as figures: what plotly.js takes, data and layout, as plain values.

Colours: hot, warm and remote have one each, the same in every figure.

Owner: pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from aof2.engine.history.fold import RETURN_NAMES, TIERS
from aof2.engine.history.heat import HOUR_MS, Cell
from aof2.engine.history.history import History
from aof2.engine.history.uses import WhatIf
from aof2.fs.wording import human_size

COLOURS: Final = {"hot": "#ef6c3d", "warm": "#f2b441", "remote": "#3b7dd8"}
FETCHED: Final = "#3b7dd8"
EVICTED: Final = "#ef6c3d"
HIT: Final = "#1f9d6b"
GREY: Final = "#c8d1dc"
INK: Final = "#1c2430"
DIM: Final = "#5d6b7e"
LINE: Final = "#e9edf2"
UNITS: Final = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
DIRECTORIES_SHOWN: Final = 12
HOURS_SHOWN: Final = 168
NAME_SHOWN: Final = 34
BARS_MAX: Final = 72
QUARTERS: Final = (0, 25, 50, 75, 100)
PERCENT: Final = {"range": [0, 104], "tickvals": QUARTERS, "ticktext": [f"{quarter} %" for quarter in QUARTERS]}
RETURNS_SHOWN: Final = ("under 1 min", "1 to 10 min", "to 1 h", "to 1 day", "later")

Figure = dict[str, Any]


class Scale(NamedTuple):
    """In which unit bytes of a figure are written."""

    size: int
    name: str

    def __call__(self, values: Sequence[int]) -> list[float]:
        return [round(value / self.size, 4) for value in values]


def scale_of(largest: int) -> Scale:
    return next((Scale(size, name) for size, name in UNITS if largest >= size), Scale(1, "bytes"))


def figures(found: History) -> dict[str, Figure]:
    """By the id of the card that shows it; those for which there is nothing are left out."""
    made: dict[str, Figure | None] = {
        "tiers": _tiers(found),
        "moves": _moves(found),
        "hits": _hits(found),
        "returns": _returns(found),
        "directories": _directories(found.hottest),
        "hours": _hours(found.heat),
        "what-if": _what_if(found),
    }
    return {name: figure for name, figure in made.items() if figure is not None}


def _layout(*, y: str = "", legend: bool = True, **more: Any) -> Figure:
    axis = {"gridcolor": LINE, "zerolinecolor": GREY, "linecolor": GREY, "automargin": True, "tickfont": {"color": DIM}}
    layout: Figure = {
        "font": {"family": "system-ui, Segoe UI, Helvetica Neue, Arial, sans-serif", "size": 12.5, "color": INK},
        "margin": {"l": 52, "r": 14, "t": 10, "b": 36},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "x unified",
        "showlegend": legend,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "xaxis": {**axis, "showgrid": False, "tickangle": 0, "nticks": 7},
        "yaxis": {**axis, "rangemode": "tozero", "title": {"text": y, "font": {"color": DIM}}},
    }
    for name, value in more.items():
        layout[name] = {**layout[name], **value} if isinstance(value, dict) and name in layout else value
    return layout


def _times(found: History) -> list[str]:
    return [_iso(ms) for ms in found.series.times_ms]


class _Bars(NamedTuple):
    """The series again, in at most BARS_MAX wider bins."""

    times_ms: list[int]
    width_ms: int
    values: list[list[int]]


def _bars(found: History, *names: str) -> _Bars:
    series = found.series
    step = max(1, -(-len(series.times_ms) // BARS_MAX))
    starts = range(0, len(series.times_ms), step)
    sums = [[sum(series.values[name][at : at + step]) for at in starts] for name in names if name in series.values]
    return _Bars([series.times_ms[at] for at in starts], series.width_ms * step, sums)


def _iso(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _tiers(found: History) -> Figure | None:
    values = found.series.values
    largest = (
        max((max(values[f"{tier}_bytes"], default=0) for tier in TIERS), default=0) if found.series.times_ms else 0
    )
    if not largest:
        return None
    scale = scale_of(largest)
    lines = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": {"hot": "hot (this disk)", "warm": "warm (compressed)", "remote": "remote"}[tier],
            "x": _times(found),
            "y": scale(values[f"{tier}_bytes"]),
            "line": {"color": COLOURS[tier], "width": 2.2, "shape": "hv"},
            "fill": "tozeroy",
            "fillcolor": f"{COLOURS[tier]}1f",
            "hovertemplate": f"%{{y:.4~g}} {scale.name}",
        }
        for tier in ("remote", "hot", "warm")
    ]
    if found.measured.limit_bytes and found.measured.limit_bytes <= 3 * largest:
        limit = found.measured.limit_bytes / scale.size
        x = _times(found)
        lines.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "limit of hot",
                "x": [x[0], x[-1]],
                "y": [limit, limit],
                "line": {"color": COLOURS["hot"], "width": 1.4, "dash": "dot"},
                "hovertemplate": f"%{{y:.4~g}} {scale.name}",
            }
        )
    return {"data": lines, "layout": _layout(y=scale.name)}


def _moves(found: History) -> Figure | None:
    bars = _bars(found, "hydrated_bytes", "evicted_bytes")
    fetched, evicted = bars.values or ([], [])
    largest = max((*fetched, *evicted), default=0)
    if not largest:
        return None
    scale = scale_of(largest)
    where = {"x": [_iso(ms) for ms in bars.times_ms], "width": bars.width_ms, "offset": 0, "type": "bar"}
    up = {**where, "name": "fetched", "y": scale(fetched), "marker": {"color": FETCHED}}
    down = {
        **where,
        "name": "evicted",
        "y": [-value for value in scale(evicted)],
        "customdata": scale(evicted),
        "marker": {"color": EVICTED},
        "hovertemplate": f"%{{customdata:.4~g}} {scale.name}",
    }
    up["hovertemplate"] = f"%{{y:.4~g}} {scale.name}"
    return {
        "data": [up, down],
        "layout": _layout(y=scale.name, barmode="relative", bargap=0.05, yaxis={"rangemode": "normal"}),
    }


def _hits(found: History) -> Figure | None:
    opened = _bars(found, "opens", "open_misses")
    opens, missed = opened.values or ([], [])
    if not sum(opens):
        return None
    at = [i for i, count in enumerate(opens) if count]
    rate = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "hit rate",
        "x": [_iso(opened.times_ms[i] + opened.width_ms // 2) for i in at],
        "y": [round(100 * max(0.0, 1 - missed[i] / opens[i]), 2) for i in at],
        "line": {"color": HIT, "width": 2.2},
        "marker": {"size": 5},
        "hovertemplate": "%{y:.1f} %",
    }
    bars = {
        "type": "bar",
        "name": "opens",
        "x": [_iso(ms) for ms in opened.times_ms],
        "y": opens,
        "yaxis": "y2",
        "marker": {"color": GREY},
        "width": opened.width_ms,
        "offset": 0,
        "hovertemplate": "%{y:,}",
    }
    right: Figure = {"side": "right", "showgrid": False, "rangemode": "tozero", "tickfont": {"color": DIM}}
    right["title"] = {"text": "opens", "font": {"color": DIM}}
    left = {**PERCENT, "overlaying": "y2", "side": "left"}
    return {"data": [bars, rate], "layout": _layout(yaxis=left, yaxis2=right, margin={"r": 56})}


def _returns(found: History) -> Figure | None:
    counts = [found.returned.get(name, 0) for name in RETURN_NAMES]
    if not sum(counts):
        return None
    colours = ["#d9480f", "#ef6c3d", "#f2b441", "#9db7d8", "#c8d1dc"]
    bars = {
        "type": "bar",
        "x": list(RETURNS_SHOWN),
        "y": counts,
        "marker": {"color": colours},
        "text": [f"{count:,}" if count else "" for count in counts],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": "%{x}: %{y:,}<extra></extra>",
    }
    return {"data": [bars], "layout": _layout(legend=False, hovermode="closest", margin={"t": 24})}


def _directories(hottest: Sequence[Cell]) -> Figure | None:
    shown = [cell for cell in hottest if cell.opens or cell.misses][:DIRECTORIES_SHOWN][::-1]
    if not shown:
        return None
    names = [_short(cell.directory) for cell in shown]

    def bar(name: str, values: list[int], colour: str) -> Figure:
        return {
            "type": "bar", "orientation": "h", "name": name, "x": values, "y": list(range(len(shown))),
            "marker": {"color": colour}, "customdata": [cell.directory for cell in shown],
            "hovertemplate": f"%{{customdata}}: %{{x:,}} {name}<extra></extra>",
        }  # fmt: skip

    return {
        "data": [bar("opens", [c.opens for c in shown], GREY), bar("fetches", [c.misses for c in shown], FETCHED)],
        "layout": _layout(
            barmode="group",
            bargap=0.25,
            hovermode="closest",
            xaxis={"showgrid": True},
            yaxis={"tickvals": list(range(len(shown))), "ticktext": names, "rangemode": "normal"},
        ),
    }


def _short(name: str) -> str:
    return name if len(name) <= NAME_SHOWN else f"…{name[1 - NAME_SHOWN :]}"


def _hours(cells: Sequence[Cell]) -> Figure | None:
    """Directories against hours, the last week of them."""
    hours = sorted({cell.hour_ms for cell in cells})[-HOURS_SHOWN:]
    if not hours:
        return None
    span = list(range(hours[-1] - (HOURS_SHOWN - 1) * HOUR_MS, hours[-1] + 1, HOUR_MS))
    span = [hour for hour in span if hour >= hours[0]]
    heat: dict[str, dict[int, int]] = {}
    for cell in cells:
        if cell.hour_ms >= hours[0]:
            heat.setdefault(cell.directory, {})[cell.hour_ms] = cell.opens + cell.misses
    names = sorted(heat, key=lambda name: (-sum(heat[name].values()), name))[:DIRECTORIES_SHOWN][::-1]
    return {
        "data": [
            {
                "type": "heatmap",
                "x": [_iso(hour + HOUR_MS // 2) for hour in span],
                "y": list(range(len(names))),
                "z": [[heat[name].get(hour, 0) for hour in span] for name in names],
                "customdata": [[name] * len(span) for name in names],
                "colorscale": [[0, "#f4f6f9"], [0.02, "#dbe7f7"], [0.35, "#8db4e8"], [1, "#1d4f9c"]],
                "zmin": 0,
                "xgap": 1,
                "ygap": 1,
                "colorbar": {"thickness": 10, "outlinewidth": 0, "tickfont": {"color": DIM}},
                "hovertemplate": "%{customdata}<br>%{x}: %{z:,}<extra></extra>",
            }
        ],
        "layout": _layout(
            legend=False,
            hovermode="closest",
            yaxis={"tickvals": list(range(len(names))), "ticktext": [_short(n) for n in names], "rangemode": "normal"},
            xaxis={"range": [_iso(span[0]), _iso(span[-1] + HOUR_MS)]},
        ),
    }


def _what_if(found: History) -> Figure | None:
    rated = sorted((one for one in found.what_if if one.uses), key=lambda one: one.hot_bytes)
    if not rated:
        return None
    scale = scale_of(rated[-1].hot_bytes)
    now = found.what_if[0]
    asked = [one for one in found.what_if[1:] if one.hot_bytes in found.asked]

    def points(ones: Sequence[WhatIf]) -> Mapping[str, Any]:
        return {
            "x": [one.hot_bytes / scale.size for one in ones],
            "y": [round(100 * (one.hit_rate or 0), 2) for one in ones],
            "customdata": [human_size(one.hot_bytes) for one in ones],
            "hovertemplate": "%{customdata}: %{y:.1f} %<extra></extra>",
        }

    line = {
        **points(rated), "type": "scatter", "mode": "lines+markers", "name": "replayed",
        "line": {"color": HIT, "width": 2.2}, "marker": {"size": 5},
    }  # fmt: skip
    here = {
        "type": "scatter", "mode": "markers", "name": "measured", "x": [now.hot_bytes / scale.size],
        "y": [round(100 * (now.measured_rate or 0), 2)],
        "marker": {"size": 13, "color": "rgba(0,0,0,0)", "line": {"color": INK, "width": 2}},
        "hovertemplate": "measured, at the size it has: %{y:.1f} %<extra></extra>",
    }  # fmt: skip
    data = [line, here]
    if asked:
        data.append(
            {**points(asked), "type": "scatter", "mode": "markers", "name": "what if",
             "marker": {"size": 12, "symbol": "diamond", "color": EVICTED}}
        )  # fmt: skip
    return {
        "data": data,
        "layout": _layout(
            hovermode="closest",
            yaxis=PERCENT,
            xaxis={"type": "log", "title": {"text": f"hot_bytes, {scale.name}", "font": {"color": DIM}}},
            margin={"b": 52},
        ),
    }
