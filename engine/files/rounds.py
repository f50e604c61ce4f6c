"""Which writers are looked at in a tick: those that grew at their last look, and the next few of the others.

A writer that does nothing is looked at again after as many ticks as it takes to go round; one that writes, every tick.
So a tick costs the same with ten writers and with ten thousand.

Invariants
- Every file is looked at again and again while it is here: no file is passed over for ever.
- A new one counts as growing until a look says otherwise.

Owner: the trio thread. A crash leaves nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Final

from aof2.engine.files.state import Mode, OpenFile

LOOKS_A_TICK: Final = 128


class Rounds:
    """Files that are written to, in the order in which they are looked at."""

    def __init__(self, looks: int = LOOKS_A_TICK) -> None:
        self._looks = looks
        self._files: OrderedDict[int, OpenFile] = OrderedDict()
        self._growing: OrderedDict[int, OpenFile] = OrderedDict()
        self._modes: dict[int, Mode | None] = {}  # as they were added
        self._counts: Counter[Mode | None] = Counter()

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[OpenFile]:
        return iter(list(self._files.values()))

    def count(self, mode: Mode) -> int:
        """How many are written to in this mode."""
        return self._counts[mode]

    def add(self, file: OpenFile) -> None:
        self.remove(file)
        self._files[file.ino] = self._growing[file.ino] = file
        self._modes[file.ino] = file.channel.mode
        self._counts[file.channel.mode] += 1

    def remove(self, file: OpenFile) -> None:
        if self._files.pop(file.ino, None) is not None:
            self._growing.pop(file.ino, None)
            self._counts[self._modes.pop(file.ino)] -= 1

    def next(self) -> list[OpenFile]:
        """Who is looked at now."""
        chosen = _take(self._growing, self._looks)
        chosen.update(_take(self._files, self._looks))
        return list(chosen.values())

    def looked_at(self, file: OpenFile, *, grew: bool) -> None:
        if grew and file.ino in self._files:
            self._growing[file.ino] = file
        elif not grew:
            self._growing.pop(file.ino, None)


def _take(files: OrderedDict[int, OpenFile], most: int) -> dict[int, OpenFile]:
    """The first so many, which are the last from here on."""
    taken: dict[int, OpenFile] = {}
    for _ in range(min(most, len(files))):
        ino, file = next(iter(files.items()))
        files.move_to_end(ino)
        taken[ino] = file
    return taken
