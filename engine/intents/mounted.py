"""The intent logs of a mount: appended to here, folded soon, and what was folded is told to the kind it is about.

Folding takes the processor from those who change names: it begins when nothing was appended for a moment, or much
waits. A caller that must not see what is behind asks for it at once (`fold`).

Invariants
- What was appended before `fold` is in the rows, and adopted, when that returns.
- Adopting follows the order of the log, on the trio thread, before a caller that waits for the fold goes on.
- Where the disk has no room, records stay in their log and are tried again; what cannot be folded is left to recovery.

Owner: the trio thread; the catalog thread folds (`log.py`). A crash leaves the logs.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

import trio

from aof2.engine.aio import result_of
from aof2.engine.catalog.batch import Batch
from aof2.engine.errors import Aof2Error, ReadOnlyError
from aof2.engine.intents.format import Intent, IntentKind, pack
from aof2.engine.intents.log import FOLDER, Folded, IntentLog
from aof2.engine.local.reserve import is_no_room
from aof2.native import sharedpage
from aof2.native.sharedpage import SharedPage

if TYPE_CHECKING:
    from aof2.engine.catalog.rows import InodeRow
    from aof2.engine.volume import Volume

log = logging.getLogger(__name__)

STREAMS_MAX: Final = 16  # places in the page
FOLD_AFTER_S: Final = 0.05
FOLD_BYTES: Final = 2 << 20
AGAIN_S: Final = 1.0  # where the disk is full
ROOM_BYTES_MIN: Final = 256 << 10  # on the disk ahead of each log: with less, names change the usual way


class Adopts(Protocol):
    """Whom the intents of a kind are about."""

    def adopt(self, folded: list[tuple[Intent, InodeRow | None]]) -> None:
        """They are in the rows now."""

    def must_stay(self, intent: Intent) -> bool:
        """Whether a file that loses its last name by this stays: it is open, or may be opened. On the catalog thread,
        in the batch."""

    async def adopted(self) -> None:
        """What `adopt` began is done when this returns."""

    def no_more(self) -> None:
        """There is no room for more, or they cannot be folded: nothing is appended until it went well again."""


class Intents:
    """Those of the tenants of one kind."""

    def __init__(self, volume: Volume, adopts: Adopts) -> None:
        self._volume = volume
        self._adopts = adopts
        self._logs: dict[int, IntentLog] = {}
        self._page: SharedPage | None = None
        self._adopted_bytes = 0
        self._own_bytes = 0  # of records that were appended here, and are not adopted
        self._token: trio.lowlevel.TrioToken | None = None
        self._woken = trio.Event()
        self._failed = False
        self.page_fd = -1
        self.folded = 0

    @property
    def page(self) -> SharedPage | None:
        return self._page

    @property
    def logs(self) -> list[IntentLog]:
        return list(self._logs.values())

    @property
    def has_failed(self) -> bool:
        return self._failed

    async def start(self, stream_ids: Iterable[int]) -> None:
        """A log for each of these tenants, as far as there are places."""
        self._token = trio.lowlevel.current_trio_token()
        self.page_fd = os.memfd_create("aof2-intents", os.MFD_CLOEXEC)
        os.ftruncate(self.page_fd, sharedpage.length())
        self._page = SharedPage(self.page_fd)
        self._page.set_block_bytes(self._volume.settings.engine.block_bytes)
        self._volume.env.make_dirs(self._volume.state_dir / FOLDER)
        for slot, stream_id in enumerate(islice(stream_ids, STREAMS_MAX)):
            stays = self._adopts.must_stay
            one = IntentLog(self._volume, stream_id, slot, self._page, stays=stays, on_folded=self._tell)
            await one.open()
            self._logs[stream_id] = one

    def close(self) -> None:
        """After the last fold: the logs are empty of news and go."""
        behind = self._failed or not self.is_folded()
        for one in self._logs.values():
            one.close(keep=behind)
        self._logs = {}
        if self.page_fd >= 0:
            os.close(self.page_fd)
            self.page_fd = -1

    # -- appending ---------------------------------------------------------------------------------------------

    def append(self, stream_id: int, kind: IntentKind, ino: int, *, parent: int, name: bytes, time_ns: int) -> bool:
        """Whether it is in the tenant's log, and may be answered."""
        one = self._logs.get(stream_id)
        if one is None or self._failed:
            return False
        record = pack(kind, ino, parent=parent, name=name, time_ns=time_ns)
        try:
            one.append(record)
        except OSError:
            return False
        self._own_bytes += len(record)
        self.wake()
        return True

    def has_room(self) -> bool:
        return all(one.held_to - one.end >= ROOM_BYTES_MIN for one in self._logs.values())

    # -- folding -----------------------------------------------------------------------------------------------

    def _total(self) -> int:
        return self._page.total() if self._page is not None else 0

    def end(self, stream_id: int) -> int:
        """Where the tenant's log ends."""
        one = self._logs.get(stream_id)
        return one.end if one is not None else 0

    def is_folded(self, *, own: bool = True) -> bool:
        """Whether the rows have all of it; not `own`: all that the channel appended."""
        if self._failed or self._page is None:
            return True
        return self._total() == self._adopted_bytes + (0 if own else self._own_bytes)

    def wake(self) -> None:
        """Something was appended."""
        self._woken.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while not self._failed:
            if self._page is not None:
                self._page.arm()
            if self.is_folded():
                await self._woken.wait()
            self._woken = trio.Event()
            await self._pause()
            try:
                await self.fold()
                for one in self.logs:
                    await one.give_back()
            except (Aof2Error, OSError):  # said where it happened
                await trio.sleep(AGAIN_S)

    async def _pause(self) -> None:
        """Until a burst pauses, or is as long as a change may be answered before the log has it: power loss takes what
        is only here, and what the log has not synced, which is as long again."""
        latest_s, before = trio.current_time() + self._volume.settings.manifest.commit_period_ms / 1000, -1
        while before != (total := self._total()) and trio.current_time() < latest_s:
            if total - self._adopted_bytes > FOLD_BYTES:
                return
            before = total
            await trio.sleep(FOLD_AFTER_S)

    async def fold(self) -> None:
        """Returns when everything appended before this call is in the rows, and adopted."""
        try:
            for one in self.logs:
                if one.end != one.adopted_to and not self._failed:
                    await result_of(self._volume.writer.submit(one.stream_id, _nothing))
        except (Aof2Error, OSError) as e:
            self._say(e)
            if not isinstance(e, ReadOnlyError):  # whose rows are as good as they will be: recovery folds the rest
                raise
        await self._adopts.adopted()

    def _say(self, e: Aof2Error | OSError) -> None:
        if is_no_room(e):
            log.warning("names wait for room on the disk", extra={"error": str(e)})
        elif not self._failed:
            # What is in the rows is served; recovery folds the rest.
            log.critical("names are not in the catalog yet", extra={"error": str(e)})
            self._failed = True
        self._adopts.no_more()

    def _tell(self, folded: Folded) -> None:
        """The catalog thread: before it answers those whose commit it was."""
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._adopt, folded)

    def _adopt(self, folded: Folded) -> None:
        one = folded.log
        for intent in folded.intents:
            size, one.adopted_to = intent.end - one.adopted_to, intent.end
            self._adopted_bytes += size
            self._own_bytes -= size if intent.is_own else 0
        self.folded += len(folded.intents)
        if one.fd >= 0:
            one.hold_ahead()
        try:
            self._adopts.adopt(list(zip(folded.intents, folded.rows, strict=True)))
        except Exception:
            # The rows have them. Raised from here it would end the loop, and with it the mount.
            log.exception("names that were folded are not taken over: files of theirs are sealed after the next start")


def _nothing(_: Batch) -> None:
    """What is behind is folded before this."""
