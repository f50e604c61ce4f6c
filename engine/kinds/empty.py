"""A kind that is not built yet: its tenants show as empty directories, and nothing can be made in them.

Owner: see `catalogued.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from aof2.engine.kinds.catalogued import Catalogued
from aof2.engine.kinds.kind import Answers
from aof2.engine.kinds.registry import Surroundings

if TYPE_CHECKING:
    from aof2.engine.volume import Volume


class Empty(Catalogued):
    def answers(self, stream_id: int) -> Answers:
        return Answers.READING


def make(at: Surroundings) -> Empty:
    return Empty(at.volume, at.tenants)


def recover(volume: Volume, tenants: Mapping[int, str]) -> None:
    """There is nothing a crash could leave."""
