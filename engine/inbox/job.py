"""A deliverer's job: it is opened at a tenant's door, its bytes are put, one commit says all of it, the writer answers.

    open_job → put, put_records, or attempts of its own → commit (put once) → wait → Done, or RefusedError

The job's id makes it the same job: a commit that is put again, by this program or another one that took this one for
dead, changes nothing and gets the answer of the first. A job that was refused may be committed anew.

Invariants
- Blobs are in the remote before the commit that lists them.
- The commit is put with If-None-Match:*; the second deliverer waits for the first one's answer.
- Nothing but the remote is asked, and nothing of it changed beside this job's own names.

Owner: one thread. A crash before the commit leaves an attempt that the writer sweeps; after it, a job that the writer
takes in at its next look or mount.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal

from aof2.engine.blob.writer import LEVEL
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error, LimitError, ReadOnlyError
from aof2.engine.inbox.format import (
    COMMIT_BYTES_MAX,
    Commit,
    Done,
    Door,
    Refused,
    RefusedError,
    decode,
    encode,
    problem_of,
)
from aof2.engine.inbox.records import RecordStage
from aof2.engine.inbox.stage import Attempt, FileBytes, Staged
from aof2.engine.remote.errors import FencedError, RemoteMissingError
from aof2.engine.remote.keys import (
    INBOX_NAME,
    InboxCommitKey,
    InboxDoneKey,
    InboxDoorKey,
    InboxKnockKey,
    InboxRefusedKey,
    name_of,
)
from aof2.engine.remote.open import open_remote
from aof2.engine.remote.store import RemoteStore
from aof2.engine.settings.remote import RemoteSettings

WAIT_S: Final = 60.0
LOOK_S_MIN: Final = 0.1
LOOK_S_MAX: Final = 2.0
CRASH_POINTS: Final = ("inbox.staged", "inbox.knocked", "inbox.committed")

Mode = Literal["append", "overwrite"]


class NotTakenInError(Aof2Error):
    """No answer in time. The job stays committed: the writer takes it in at its next look or mount; ask again then."""


@contextlib.contextmanager
def open_inbox(remote: RemoteSettings, tenant: str, *, env: Env | None = None) -> Iterator[Inbox]:
    """The inbox of one tenant. ReadOnlyError: there is none, and what to do."""
    env = env or Env()
    store = open_remote(env, remote)
    try:
        yield Inbox(store, tenant, env=env)
    finally:
        store.close()


class Inbox:
    """A tenant's, as a deliverer sees it."""

    def __init__(self, store: RemoteStore, tenant: str, *, door: Door | None = None, env: Env | None = None) -> None:
        """`door`: where another process of the same job has read it."""
        self.env = env or Env()
        self.store = store
        self.door = door or read_door(store, tenant)

    def open_job(self, job_id: str = "", *, to: str, mode: Mode = "append", level: int = LEVEL) -> Job:
        """`to`: a directory of the tenant, or a stream; it is made where it is not there. Without an id the job gets
        one that no other has, and cannot be asked for again."""
        job_id = job_id or secrets.token_hex(16)
        if INBOX_NAME.fullmatch(job_id) is None:
            raise LimitError(f"job {job_id[:100]!r}: an id is 1 to 64 of A-Z a-z 0-9 _ -")
        return Job(self, job_id, to=to.strip("/"), mode=mode, level=level)


def read_door(store: RemoteStore, tenant: str) -> Door:
    key = name_of(InboxDoorKey(tenant))
    try:
        return decode(store.get_blob(key)[1], Door, key=key)
    except RemoteMissingError:
        raise ReadOnlyError(
            f"tenant {tenant} takes nothing in: {key} is not in the remote; mount the volume once with [follow] "
            "inbox_period set, or name another tenant"
        ) from None


class Job:
    """Made by `Inbox.open_job`."""

    def __init__(self, inbox: Inbox, job_id: str, *, to: str, mode: Mode, level: int) -> None:
        self.inbox = inbox
        self.job_id = job_id
        self.to = to
        self.mode: Mode = mode
        self._store = inbox.store
        self._tenant = inbox.door.tenant
        self._attempt = self.attempt(level=level)
        self._records: RecordStage | None = None

    @property
    def takes_records(self) -> bool:
        return self.inbox.door.kind == "append"

    def attempt(self, name: str = "", *, level: int = LEVEL) -> Attempt:
        """One more, for a task that works by itself: what it `finish`es goes to `commit`."""
        return Attempt(self._store, self.inbox.door, self.job_id, name=name, level=level)

    # -- putting -----------------------------------------------------------------------------------------------

    def put(self, path: str, source: FileBytes) -> None:
        """A file, by its path below the job's directory: bytes, a path of this machine, or a stream that is read."""
        if self.takes_records:
            raise LimitError(f"tenant {self._tenant} holds streams: put_records")
        self._attempt.put_file(path, source)

    def put_records(self, payloads: Iterable[bytes]) -> None:
        """Records, one each, behind those before."""
        self.records().add_payloads(payloads)

    def records(self) -> RecordStage:
        if not self.takes_records:
            raise LimitError(f"tenant {self._tenant} holds files: put")
        if self._records is None:
            self._records = record_stage(self._attempt, self.inbox.door)
        return self._records

    # -- committing --------------------------------------------------------------------------------------------

    def commit(self, parts: Iterable[Staged] = ()) -> Job:
        """All that was put, and what the attempts of others finished, in their order. LimitError: it is no job."""
        if self._records is not None:
            self._records.flush()
        staged = Staged.joined([self._attempt.finish(), *parts])
        said = Commit(
            volume_uuid=self.inbox.door.volume_uuid,
            tenant=self._tenant,
            job_id=self.job_id,
            what="records" if self.takes_records else "files",
            mode=self.mode,
            to=self.to,
            objects=staged.objects,
            files=staged.files,
            segments=staged.segments,
        )
        if problem := problem_of(said, key=name_of(InboxCommitKey(self._tenant, self.job_id))):
            raise LimitError(f"job {self.job_id}: {problem}")
        data = encode(said)
        if len(data) > COMMIT_BYTES_MAX:
            raise LimitError(f"job {self.job_id}: its commit has {len(data)} bytes, {COMMIT_BYTES_MAX} at most")
        self.inbox.env.failpoint("inbox.staged")
        self._put(data)
        return self

    def _put(self, data: bytes) -> None:
        knock, commit = (name_of(kind(self._tenant, self.job_id)) for kind in (InboxKnockKey, InboxCommitKey))
        refused = name_of(InboxRefusedKey(self._tenant, self.job_id))
        if self._store.head_blob(refused) is not None:
            self._store.delete([commit])  # before its answer: so the writer never meets a commit that it answered
            self._store.delete([refused])
        self._store.put_blob(knock, b"", 0)
        self.inbox.env.failpoint("inbox.knocked")
        with contextlib.suppress(FencedError):  # another attempt at the job was committed: its answer is ours
            self._store.put_if_absent(commit, data)
        self.inbox.env.failpoint("inbox.committed")

    # -- waiting -----------------------------------------------------------------------------------------------

    def wait(self, wait_s: float = WAIT_S, *, sleep_s: Callable[[float], object] = time.sleep) -> Done:
        """What the job brought, once it is durable. RefusedError, NotTakenInError."""
        until_s, pause_s = time.monotonic() + wait_s, LOOK_S_MIN
        while True:
            done = self.answer()
            if done is not None:
                return done
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise NotTakenInError(
                    f"job {self.job_id}: no answer within {wait_s:g} s; it stays committed, and the volume's writer "
                    "takes it in at its next mount"
                )
            sleep_s(min(pause_s, left_s))
            pause_s = min(LOOK_S_MAX, 1.5 * pause_s)

    def answer(self) -> Done | None:
        """None: there is none yet. RefusedError."""
        done = self._read(name_of(InboxDoneKey(self._tenant, self.job_id)))
        if done is not None:
            return decode(done, Done)
        refused = self._read(name_of(InboxRefusedKey(self._tenant, self.job_id)))
        if refused is not None:
            raise RefusedError(f"job {self.job_id} was refused: {decode(refused, Refused).reason}")
        return None

    def _read(self, key: str) -> bytes | None:
        try:
            return self._store.get_blob(key)[1]
        except RemoteMissingError:
            return None


def record_stage(attempt: Attempt, door: Door) -> RecordStage:
    return RecordStage(attempt, segment_bytes=door.segment_bytes, record_max_bytes=door.record_max_bytes)
