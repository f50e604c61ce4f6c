"""A report in words: a table of facts, and a line for each finding, however it was made.

Owner: pure.
"""

from __future__ import annotations

from aof2.engine.units import format_size
from aof2.engine.verify.findings import Finding, Report, Severity


def lines_of(report: Report) -> list[str]:
    return [_line(found) for found in report.findings]


def _line(found: Finding) -> str:
    if found.severity is Severity.NOTE:
        return f"note: {found.message}"
    if found.repaired:
        return f"repaired: {found.message}"
    hint = "; --repair mends it" if found.repairable else ""
    return f"{found.severity}: {found.kind}: {found.message}{hint}"


def facts_of(report: Report) -> list[tuple[str, str]]:
    left = report.errors + report.warnings - report.repaired
    verdict = "clean" if report.clean else f"{left} finding(s) left, {report.repaired} repaired"
    local = f"{report.blocks} block(s) of {report.objects} object(s), {format_size(report.local_bytes)} read"
    read = f", {report.blobs} blob(s), {format_size(report.remote_bytes)} read" if report.remote == "read" else ""
    facts = [
        ("volume", report.state_dir + (" (mounted)" if report.live else "")),
        ("verdict", verdict),
        ("log", f"{report.streams} stream(s), {report.records} record(s), {report.evictions} eviction(s) proven"),
        ("local", local),
        ("remote", report.remote + read),
        ("errors", str(report.errors)),
        ("warnings", str(report.warnings)),
        ("notes", str(report.notes)),
    ]
    if report.left_off:
        facts.append(("left off", f"{report.left_off} more finding(s); run it again after repairs"))
    return facts
