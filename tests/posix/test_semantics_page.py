"""Every promise of fs/SEMANTICS.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TOP = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def promises() -> dict[int, str]:
    page = (TOP / "fs" / "SEMANTICS.md").read_text()
    sections = [part.split("\n## ")[0] for part in re.split(r"\n(?=\d+\. )", page)[1:]]
    found = {int(text.split(".")[0]): text for text in sections}
    assert len(found) == len(sections), "a number is there twice"
    return found


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_promises_are_numbered_in_order() -> None:
    assert list(promises()) == list(range(1, len(promises()) + 1))


def test_every_promise_names_a_test_that_exists() -> None:
    missing = []
    for number, text in promises().items():
        named = NAMED.findall(text)
        if not named:
            missing.append(f"{number}: names no test")
        for file, name in named:
            if not (TOP / file).exists() or name not in functions(TOP / file):
                missing.append(f"{number}: {file}::{name}")
    assert not missing


def test_nothing_else_on_the_page_names_a_test_that_does_not_exist() -> None:
    for file, name in NAMED.findall((TOP / "fs" / "SEMANTICS.md").read_text()):
        assert name in functions(TOP / file)
