"""The queue against a model of it, and its rules one by one."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import JobRow, JobState, JobType
from aof2.engine.env import Env
from aof2.engine.jobs import queue
from aof2.engine.jobs.errors import JobGoneError, judge
from aof2.engine.manifest.format import ReasonCode
from tests.catalog.helpers import Volume, every_row, open_volume, volume

VERIFY = JobType.VERIFY_MANIFEST
LEASE_MS = 30_000


class Bench:
    """A catalog with a clock that stands still until told."""

    def __init__(self, root: Path) -> None:
        self.now_ms = 1_700_000_000_000
        self.root = root
        self.env = Env(now_ms=lambda: self.now_ms)
        self.v: Volume = open_volume(root, env=self.env)

    def do(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.v.writer.call(1, lambda b: work(b, *args, **kwargs))

    def rows(self) -> dict[int, JobRow]:
        with self.v.catalog.view() as view:
            return {row.job_id: row for row in queue.jobs(view, 1)}

    def claim(self, **kwargs: Any) -> JobRow | None:
        row: JobRow | None = self.do(queue.claim, lease_ms=LEASE_MS, **kwargs)
        return row

    def reopen(self) -> None:
        self.v.close()
        self.v = open_volume(self.root, env=self.env)


@contextmanager
def bench(root: Path) -> Iterator[Bench]:
    b = Bench(root)
    try:
        yield b
    finally:
        b.v.close()


def test_the_oldest_due_job_comes_first(tmp_path: Path) -> None:
    with bench(tmp_path) as q:
        ids = [q.do(queue.enqueue, VERIFY, f"t{i}", b"body")[0] for i in range(3)]
        assert ids == [1, 2, 3]
        first = q.claim()
        assert first is not None
        assert (first.job_id, first.state, first.lease_until_ms) == (1, JobState.RUNNING, q.now_ms + LEASE_MS)
        assert queue.envelope(first).body == b"body"
        assert q.claim(types=(JobType.PRUNE_CHECKPOINT,)) is None
        assert q.claim(skip=(2,)).job_id == 3  # type: ignore[union-attr]
        assert q.claim().job_id == 2  # type: ignore[union-attr]
        assert q.claim() is None


def test_a_token_names_one_job_that_is_not_over(tmp_path: Path) -> None:
    with bench(tmp_path) as q:
        assert q.do(queue.enqueue, VERIFY, "a") == (1, True)
        assert q.do(queue.enqueue, VERIFY, "a") == (1, False)
        q.claim()
        assert q.do(queue.enqueue, VERIFY, "a") == (1, False)
        q.do(queue.finish, 1)
        assert q.do(queue.enqueue, VERIFY, "a") == (2, True)
        q.claim()
        q.do(queue.fail, 2, reason="broken")
        assert q.do(queue.enqueue, VERIFY, "a") == (3, True)
        assert [row.state for row in q.rows().values()] == [JobState.DONE, JobState.FAILED, JobState.QUEUED]
        assert not q.do(queue.retry, 2)  # the third does it


def test_failures_back_off_and_end_visible(tmp_path: Path) -> None:
    with bench(tmp_path) as q:
        q.do(queue.enqueue, VERIFY, "a")
        for attempt, wait_ms in enumerate([500, 1000, 2000, 4000], 1):
            assert q.claim() is not None
            row = q.do(queue.fail, 1, reason="away", reason_code=3, retryable=True, attempts_max=5)
            assert (row.state, row.attempts, row.not_before_ms - q.now_ms) == (JobState.QUEUED, attempt, wait_ms)
            q.now_ms += wait_ms - 1
            assert q.claim() is None
            q.now_ms += 1
        assert q.claim() is not None
        row = q.do(queue.fail, 1, reason="away", reason_code=3, retryable=True, attempts_max=5)
        assert (row.state, row.attempts, row.reason, row.reason_code) == (JobState.FAILED, 5, "away", 3)
        assert q.claim() is None
        q.reopen()
        assert q.rows()[1] == row
        assert q.do(queue.retry, 1)
        assert q.claim().attempts == 0  # type: ignore[union-attr]


def test_backoff_grows_to_a_minute_and_jitters_a_half() -> None:
    for attempts in range(1, 100):
        full = min(60_000, 500 * 2 ** (attempts - 1))
        assert queue.backoff_ms(attempts, 0.0) == full // 2
        assert queue.backoff_ms(attempts, 1.0) == full
        assert full // 2 <= queue.backoff_ms(attempts, random.random()) <= full


def test_a_lease_runs_out_unless_renewed(tmp_path: Path) -> None:
    with bench(tmp_path) as q:
        q.do(queue.enqueue, VERIFY, "a")
        q.claim()
        q.now_ms += LEASE_MS - 1
        assert q.claim() is None
        q.do(queue.renew, 1, lease_ms=LEASE_MS)
        q.now_ms += LEASE_MS - 1
        assert q.claim() is None
        q.now_ms += 1
        assert q.claim().job_id == 1  # type: ignore[union-attr]


def test_a_clock_that_goes_back_stops_nothing(tmp_path: Path) -> None:
    with bench(tmp_path) as q:
        q.do(queue.enqueue, VERIFY, "a")
        q.claim()
        q.do(queue.fail, 1, reason="x", retryable=True)
        q.now_ms -= 900_000
        assert q.claim() is not None
        q.now_ms -= 700_000
        assert q.claim() is not None  # the lease lies further ahead than any lease


def test_progress_and_report_survive(tmp_path: Path) -> None:
    with bench(tmp_path) as q:
        q.do(queue.enqueue, VERIFY, "a", b"start", total=12)
        q.claim()
        q.do(queue.progress, 1, 7, 12, body=b"here", report=t.encode({"found": 2}))
        q.do(queue.progress, 1, 8, 12)
        q.reopen()
        row = q.rows()[1]
        assert (row.done, row.total, queue.envelope(row).body, queue.report(row)) == (8, 12, b"here", {"found": 2})
        assert q.do(queue.recover) == [1]
        assert q.rows()[1].state == JobState.QUEUED
        with pytest.raises(JobGoneError, match="QUEUED"):
            q.do(queue.progress, 1, 9, 12)


def test_cancel_is_a_wish_to_who_runs_it(tmp_path: Path) -> None:
    with bench(tmp_path) as q:
        for name in "abc":
            q.do(queue.enqueue, VERIFY, name)
        assert q.do(queue.cancel, 3) == JobState.CANCELLED
        q.claim()
        assert q.do(queue.cancel, 1) == JobState.RUNNING
        q.do(queue.progress, 1, 1, 2, body=b"more")
        assert queue.envelope(q.rows()[1]).cancel_requested
        q.do(queue.recover)  # the process died before it got round to it
        assert q.rows()[1].state == JobState.CANCELLED
        q.claim()
        q.do(queue.fail, 2, reason="no")
        assert q.do(queue.cancel, 2) == JobState.CANCELLED
        with pytest.raises(JobGoneError, match="no job 9"):
            q.do(queue.cancel, 9)


def test_what_is_over_is_forgotten_in_time_and_failures_are_not(tmp_path: Path) -> None:
    with bench(tmp_path) as q:
        q.do(queue.enqueue, VERIFY, "bad")
        q.claim()
        q.do(queue.fail, 1, reason="broken")
        for i in range(queue.FINISHED_KEPT + 10):
            job_id, _ = q.do(queue.enqueue, VERIFY, f"t{i}")
            q.claim()
            q.do(queue.finish, job_id)
        rows = q.rows()
        assert rows[1].state == JobState.FAILED
        assert sum(row.state == JobState.DONE for row in rows.values()) == queue.FINISHED_KEPT
        with q.v.catalog.view() as view:
            assert set(dict(view.scan(1, t.JOB_TOKENS)).values()) == set(rows)


def test_the_log_alone_gives_the_same_jobs(tmp_path: Path) -> None:
    with bench(tmp_path) as q:
        for i in range(5):
            q.do(queue.enqueue, VERIFY, f"t{i}", b"x" * i)
            q.claim()
        q.do(queue.finish, 1)
        q.do(queue.fail, 2, reason="r")
        q.do(queue.cancel, 3)
        with q.v.catalog.view() as view:
            before = every_row(view)
    for path in (tmp_path / "catalog").iterdir():
        path.unlink()
    with volume(tmp_path) as v, v.catalog.view() as view:
        assert v.opened.rebuilt
        assert every_row(view) == before


def test_every_error_has_a_verdict() -> None:
    assert not judge(ValueError("bug"), VERIFY).expected
    assert judge(OSError("disk"), VERIFY).retryable


class QueueMachine(RuleBasedStateMachine):
    """The same operations on the rows and on a dictionary."""

    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.q = Bench(Path(self.folder.name))
        self.model: dict[int, dict[str, Any]] = {}

    def teardown(self) -> None:
        if hasattr(self, "q"):
            self.q.v.close()
            self.folder.cleanup()

    def _pick(self, n: int, *states: JobState) -> int | None:
        ids = [job_id for job_id, job in self.model.items() if job["state"] in states]
        return ids[n % len(ids)] if ids else None

    @rule(token=st.sampled_from("abcd"))
    def enqueue(self, token: str) -> None:
        live = [i for i, j in self.model.items() if j["token"] == token and j["state"] in queue.LIVE]
        job_id, fresh = self.q.do(queue.enqueue, VERIFY, token)
        assert fresh == (not live)
        if live:
            assert [job_id] == live
        else:
            self.model[job_id] = {
                "token": token,
                "state": JobState.QUEUED,
                "attempts": 0,
                "due": 0,
                "done": 0,
                "wish": False,
            }

    @rule()
    def claim(self) -> None:
        now = self.q.now_ms
        row = self.q.claim()
        for job_id, job in sorted(self.model.items()):
            if job["state"] in queue.LIVE and job["due"] <= now:
                if job["wish"]:
                    job.update(state=JobState.CANCELLED)
                    continue
                assert row is not None
                assert row.job_id == job_id
                job.update(state=JobState.RUNNING, due=now + LEASE_MS)
                return
        assert row is None

    @rule(n=st.integers(0, 9), done=st.integers(0, 100))
    def progress(self, n: int, done: int) -> None:
        if (job_id := self._pick(n, JobState.RUNNING)) is not None:
            self.q.do(queue.progress, job_id, done, 100)
            self.model[job_id]["done"] = done

    @rule(n=st.integers(0, 9))
    def finish(self, n: int) -> None:
        if (job_id := self._pick(n, JobState.RUNNING)) is not None:
            self.q.do(queue.finish, job_id)
            self.model[job_id]["state"] = JobState.DONE

    @rule(n=st.integers(0, 9), retryable=st.booleans(), jitter=st.sampled_from([0.0, 0.5, 1.0]))
    def fail(self, n: int, retryable: bool, jitter: float) -> None:
        if (job_id := self._pick(n, JobState.RUNNING)) is not None:
            self.q.do(queue.fail, job_id, reason="r", retryable=retryable, attempts_max=3, jitter=jitter)
            job = self.model[job_id]
            job["attempts"] += 1
            again = retryable and job["attempts"] < 3
            due = self.q.now_ms + queue.backoff_ms(job["attempts"], jitter)
            job.update(state=JobState.QUEUED if again else JobState.FAILED, due=due if again else 0)

    @rule(n=st.integers(0, 9))
    def cancel(self, n: int) -> None:
        if (job_id := self._pick(n, JobState.QUEUED, JobState.RUNNING, JobState.FAILED)) is not None:
            self.q.do(queue.cancel, job_id)
            job = self.model[job_id]
            if job["state"] == JobState.RUNNING:
                job["wish"] = True
            else:
                job["state"] = JobState.CANCELLED

    @rule(n=st.integers(0, 9))
    def release(self, n: int) -> None:
        if (job_id := self._pick(n, JobState.RUNNING)) is not None:
            self.q.do(queue.release, job_id)
            self.model[job_id].update(state=JobState.QUEUED, due=0)

    @rule(ms=st.sampled_from([1, 400, 5_000, 60_000]))
    def time_passes(self, ms: int) -> None:
        self.q.now_ms += ms

    @precondition(lambda self: len(self.model) > 1)
    @rule(restart=st.booleans())
    def crash(self, restart: bool) -> None:
        if restart:
            self.q.reopen()
        self.q.do(queue.recover)
        for job in self.model.values():
            if job["state"] == JobState.RUNNING:
                job.update(state=JobState.CANCELLED if job["wish"] else JobState.QUEUED, due=0)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "q"):
            return
        rows = self.q.rows()
        seen = {i: (r.token, r.state, r.attempts, r.done) for i, r in rows.items()}
        assert seen == {i: (j["token"], j["state"], j["attempts"], j["done"]) for i, j in self.model.items()}
        tokens = [r.token for r in rows.values() if r.state in queue.LIVE]
        assert len(tokens) == len(set(tokens))


QueueMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestQueue = QueueMachine.TestCase


def test_jobs_that_lacked_credentials_are_tried_at_the_next_start(tmp_path: Path) -> None:
    with bench(tmp_path) as q:
        for name, code in (("auth", ReasonCode.AUTH), ("other", ReasonCode.CODEC)):
            job_id, _ = q.do(queue.enqueue, VERIFY, name)
            q.claim()
            q.do(queue.fail, job_id, reason="x", reason_code=int(code))
        assert q.do(queue.recover) == [1]
        assert [row.state for row in q.rows().values()] == [JobState.QUEUED, JobState.FAILED]
