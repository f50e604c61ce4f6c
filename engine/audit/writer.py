"""AuditWriter: appends batches to one audit log, each durable and whole or absent.

Invariants
- One writer a file: an exclusive flock is held from open to close, a second writer gets ReadOnlyError.
- A name means a header: the file is created under a temporary name, synced, renamed, and its folder synced.
- On open the whole chain is verified before anything is changed; broken history raises and is left as it is.
- logseq starts at 1 and rises by 1. `append` returns when its records are durable. Equal payloads give equal bytes.
- One record: one write, one fsync; its hash tells whether it is whole. Several: the two steps of commit.py.
- A failed write (ENOSPC) is taken back and raised: the log is as it was. A failed fsync is FatalIOError, and the writer
  is read-only for good.

A crash leaves: nothing or `<path>.tmp` (the next open replaces it); a torn tail (the next open trims it); a batch that
lacks only its commit bytes (the next open completes it). Nothing acknowledged is lost, and trimming and completing can
themselves be interrupted and repeated.

Owner: the thread that writes the manifest. Not shared, not used across fork.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from aof2.engine.audit import format as fmt
from aof2.engine.audit.commit import BATCH_BYTES_MAX, LOGSEQ_BYTES, commit_slice
from aof2.engine.audit.damage import Tail
from aof2.engine.audit.reader import LogRecord, Outcome, Position, Replay
from aof2.engine.audit.source import Source
from aof2.engine.env import Env
from aof2.engine.errors import FatalIOError, LimitError, ReadOnlyError
from aof2.engine.fds import opened

CRASH_POINTS = (
    "audit.create.temp",
    "audit.create.synced",
    "audit.create.renamed",
    "audit.create.done",
    "audit.append.body",
    "audit.append.synced",
    "audit.append.logseq",
    "audit.append.done",
    "audit.trim.cut",
    "audit.trim.synced",
    "audit.complete.logseq",
    "audit.complete.synced",
)

log = logging.getLogger(__name__)


class AuditWriter:
    """Opens or creates the log at `path`.

    `on_record` sees every record already there (say, `VisibleState.apply`), in the same pass that verifies it.
    `acknowledged`: the highest logseq the caller knows to be durable; a log that ends before it is ChainBrokenError
    instead of being trimmed.
    """

    def __init__(
        self,
        env: Env,
        path: Path,
        *,
        on_record: Callable[[LogRecord], None] | None = None,
        acknowledged: int = 0,
    ) -> None:
        self._env = env
        self.path = path
        self._read_only = ""
        self._fd = self._open_or_create()
        try:
            self._lock()
            self.recovered = self._recover(on_record, acknowledged)
        except BaseException:
            env.files.close(self._fd)
            raise
        self.next_logseq = self.recovered.position.logseq
        self.last_hash = self.recovered.position.prev_hash
        self.end = self.recovered.position.offset

    def _open_or_create(self) -> int:
        files = self._env.files
        try:
            return files.open_rw(self.path)
        except FileNotFoundError:
            pass
        # Two creators must not rename over each other: the folder is locked while one looks again and creates.
        with opened(self.path.parent, os.O_RDONLY | os.O_DIRECTORY) as folder:
            fcntl.flock(folder, fcntl.LOCK_EX)
            if not self.path.exists():
                self._env.replace_file(self.path, fmt.encode_header(), point="audit.create")
                self._env.failpoint("audit.create.done")
            return files.open_rw(self.path)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ReadOnlyError(f"{self.path}: another process writes this audit log") from None

    def _recover(self, on_record: Callable[[LogRecord], None] | None, acknowledged: int) -> Outcome:
        files, env = self._env.files, self._env
        replay = Replay(Source.of_fd(self._fd, str(self.path)))
        for record in replay:
            if on_record is not None:
                on_record(record)
        found = replay.outcome
        at = found.position
        if at.logseq <= acknowledged:
            raise fmt.ChainBrokenError(
                f"the log ends here, {acknowledged} was acknowledged",
                logseq=at.logseq,
                offset=at.offset,
                path=str(self.path),
            )
        if found.tail is Tail.TORN:
            files.truncate(self._fd, at.offset)
            env.failpoint("audit.trim.cut")
        if found.commit_at is not None:
            self._write_logseq(found.commit_at, committing=False)
        # What was read may be in the page cache only (a killed process): it is durable before an append builds on it.
        files.fsync(self._fd)
        if found.tail is Tail.TORN:
            env.failpoint("audit.trim.synced")
            log.info("%s: trimmed %d bytes of an unfinished append", self.path, found.dropped_bytes)
        if found.commit_at is not None:
            self._write_logseq(found.commit_at, committing=True)
            env.failpoint("audit.complete.logseq")
            files.fsync(self._fd)
            env.failpoint("audit.complete.synced")
            log.info("%s: completed the batch that starts with logseq %d", self.path, found.commit_at.logseq)
        return found

    def _write_logseq(self, at: Position, *, committing: bool) -> None:
        """The commit bytes, or (before them) the bytes of the same logseq that lie in the other sector."""
        field = at.logseq.to_bytes(LOGSEQ_BYTES, "little")
        last = commit_slice(at.offset, at.logseq)
        for part in (last,) if committing else (slice(0, last.start), slice(last.stop, LOGSEQ_BYTES)):
            if field[part]:
                self._env.files.pwrite(self._fd, field[part], at.offset + part.start)

    def append(self, payloads: Sequence[fmt.Payload]) -> list[int]:
        """Appends `payloads` as one batch, all or none; returns their logseqs once they are durable.

        LimitError over BATCH_BYTES_MAX. OSError (ENOSPC): nothing was appended. FatalIOError: it is not known.
        """
        if self._read_only:
            raise ReadOnlyError(f"{self.path}: {self._read_only}")
        if not payloads:
            return []
        batch, last_hash = self._encode(payloads)
        try:
            self._write(batch, len(payloads))
        except FatalIOError:
            self._read_only = "an fsync failed, what is on disk is not known"
            raise
        except BaseException:
            self._take_back()
            raise
        first = self.next_logseq
        self.next_logseq += len(payloads)
        self.last_hash = last_hash
        self.end += len(batch)
        return list(range(first, self.next_logseq))

    def _encode(self, payloads: Sequence[fmt.Payload]) -> tuple[bytearray, bytes]:
        batch = bytearray()
        prev = self.last_hash
        for logseq, payload in enumerate(payloads, self.next_logseq):
            record = fmt.encode_record(prev, logseq, *fmt.encode_payload(payload))
            prev = record[-fmt.HASH_BYTES :]
            batch += record
            if len(batch) > BATCH_BYTES_MAX:
                raise LimitError(
                    f"an audit batch holds {BATCH_BYTES_MAX} bytes; append {len(payloads)} records in parts"
                )
        return batch, prev

    def _write(self, batch: bytearray, records: int) -> None:
        files, env = self._env.files, self._env
        if records == 1:
            files.pwrite(self._fd, batch, self.end)
            env.failpoint("audit.append.body")
        else:
            last = commit_slice(self.end, self.next_logseq)
            commit = bytes(batch[last])
            batch[last] = bytes(len(commit))
            # The size grows in one step: a batch cut where one of its records ends would pass for a whole one.
            files.truncate(self._fd, self.end + len(batch))
            files.pwrite(self._fd, batch, self.end)
            env.failpoint("audit.append.body")
            files.fsync(self._fd)
            env.failpoint("audit.append.synced")
            files.pwrite(self._fd, commit, self.end + last.start)
            env.failpoint("audit.append.logseq")
        files.fsync(self._fd)
        env.failpoint("audit.append.done")

    def _take_back(self) -> None:
        """Cuts a failed append off, durably: its pages must not come back under the next one."""
        try:
            self._env.files.truncate(self._fd, self.end)
            self._env.files.fsync(self._fd)
        except (OSError, FatalIOError) as e:
            self._read_only = f"a failed append could not be taken back: {e}"
            raise FatalIOError(f"{self.path}: {self._read_only}") from e

    def close(self) -> None:
        """Gives the lock up. Everything acknowledged is durable already."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._read_only = self._read_only or "closed"
            self._env.files.close(fd)

    def __enter__(self) -> AuditWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
