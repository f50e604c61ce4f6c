"""The catalog thread of a follower: what changes here goes into this machine's own log; the writer's log is replayed.

Invariants
- A change that is not this machine's own is refused (ReadOnlyError), and changes nothing.
- Folded tier records (`segments`) are those of the writer's log.

Owner: the group thread. A crash leaves own logs that are ahead of the rows by at most one group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch, Mutation
from aof2.engine.catalog.writer import CatalogTarget, StreamState
from aof2.engine.errors import ReadOnlyError
from aof2.engine.follow.ownlog import put_own_position
from aof2.engine.follow.ownrows import is_own
from aof2.engine.manifest.batch import RecordBatch
from aof2.engine.manifest.format import LogPosition

WHY: Final = "this mount follows the volume; its writer is another machine"
SAVE_EVERY_BYTES: Final = 8 << 20
_OBJECTS: Final = (t.OBJECTS.number, t.OBJECTS.tag)


class FollowerTarget(CatalogTarget):
    """Takes changes of what is this machine's own alone. `save` writes down what is, so that its log stays small."""

    save: Callable[[int], object] | None = None

    def housekeep(self) -> None:
        for stream in self.streams.values():
            if stream.logged_bytes >= SAVE_EVERY_BYTES and self.save is not None:
                stream.logged_bytes = 0
                stream.log.sync()
                self.save(stream.stream_id)
        super().housekeep()

    def _stage(self, stream: StreamState, batch: Batch, mutations: list[Mutation]) -> None:
        for number, key, value in mutations:
            if not is_own(number, key) and not self._is_backing(batch, number, key, value):
                raise ReadOnlyError(WHY)
        super()._stage(stream, batch, mutations)

    def _is_backing(self, batch: Batch, number: int, key: bytes, value: bytes | None) -> bool:
        """Whether nothing else of an object changes."""
        if (number, key[:1]) != _OBJECTS or value is None:
            return False
        old = batch.view.get(batch.stream_id, t.OBJECTS, t.OBJECTS.unpack_key(key[1:]))
        new = t.OBJECTS.decode(value)
        return old is not None and msgspec.structs.replace(old, backing=new.backing) == new

    def _fold(self, stream: StreamState, records: RecordBatch) -> None:
        """The segments' rows are the writer's."""

    def _put_positions(self, positions: Mapping[int, LogPosition]) -> None:
        for stream_id, position in positions.items():
            put_own_position(self._txn, self.catalog, stream_id, position)
