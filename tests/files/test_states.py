"""The states of a file and of an object's handle: which follow which, what they mean, what a closed file takes."""

from __future__ import annotations

import errno
import itertools
import os
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import trio

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import ChunkRow, ObjectRow, ObjectState, stream_of
from aof2.engine.files import Files
from aof2.engine.files.atchannel import NOT_OPEN, AtChannel
from aof2.engine.files.ledger import Ledger
from aof2.engine.files.state import TRANSITIONS, Mode, OpenFile, State
from aof2.engine.local import handles
from aof2.engine.local.handles import ObjectHandle, Use
from tests.engine.helpers import small_settings
from tests.files.helpers import FakeKernel, make, publish, row_of, run_files, top

KEY = (1, 2, 1)
DATA = bytes(range(256)) * 40


def a_base(use: Use = Use.SHARED) -> ObjectHandle:
    row = ObjectRow(2, 1, ObjectState.PUBLISHED, size=4096, chunk_bytes=65536)
    return ObjectHandle(KEY, "t", Path("x"), row, [ChunkRow(1, 2, 1, 0, 4096)], [0], 4096, use)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, State)))
def test_a_step_that_is_not_in_the_table_raises(before: State, after: State) -> None:
    file = OpenFile(KEY, "t", Path("x"), before)
    if after in TRANSITIONS[before]:
        file.become(after)
        assert file.state is after
    else:
        with pytest.raises(ValueError, match=f"{after.name} after {before.name}"):
            file.become(after)
        assert file.state is before


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Use, Use)))
def test_the_same_of_handles(before: Use, after: Use) -> None:
    base = a_base(before)
    if after in handles.TRANSITIONS[before]:
        base.become(after)
        assert base.use is after
    else:
        with pytest.raises(ValueError, match=f"{after.name} after {before.name}"):
            base.become(after)


def test_each_state_says_what_is_here() -> None:
    file, ledger = OpenFile(KEY, "t", Path("x"), State.CLEAN), Ledger()
    file.base, file.base_len = a_base(), 4096
    file.counted_by(ledger)
    assert (file.dirty, file.whole, file.partial, ledger.files) == (False, False, False, 0)
    file.become(State.DIRTY_PARTIAL, file.base, 4096)
    assert (file.dirty, file.whole, file.partial, ledger.files) == (True, False, True, 1)
    assert file.is_absent(0, 4096)
    file.become(State.DIRTY_WHOLE)
    assert (file.dirty, file.whole, file.partial, ledger.files) == (True, True, False, 1)
    assert not file.is_absent(0, 4096) and file.base is None
    file.charged_bytes = 100
    file.become(State.GONE)
    assert (file.dirty, file.whole, file.partial, ledger.files, ledger.bytes) == (False, False, False, 0, 0)


def test_a_closed_file_takes_little() -> None:
    """Tens of thousands of them wait for their seal."""
    file = OpenFile(KEY, "t", Path("x"))
    assert sys.getsizeof(file) <= 256 and not hasattr(file, "__dict__")
    file.channel = AtChannel(Mode.RANGED)
    file.taken.wrote_s[0] = 1.0
    assert file.closed().mode is Mode.RANGED
    assert file.channel is NOT_OPEN and file._taken is None and file._io is None and file._room is None


def test_a_chunk_on_its_way_out_is_not_forgotten_at_the_close() -> None:
    file = OpenFile(KEY, "t", Path("x"))
    file.taken.clearing.add(0)
    file.closed()
    assert file.clearing == {0}


def test_what_no_channel_was_told_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="not open"):
        NOT_OPEN.registered = True
    assert NOT_OPEN.mode is None and not NOT_OPEN.ranged and not NOT_OPEN.passed


def test_what_is_fetched_for_a_writer_is_checked_before_it_lands(tmp_path: Path) -> None:
    """After a crash what is in the file counts as written. Also of the base that parts of a file made."""

    async def body(files: Files, kernel: FakeKernel) -> None:
        row, fh = await files.create(top(files.volume), b"a", os.O_RDWR, mode=0o644, uid=0, gid=0)
        file = files.known.get(row.ino)
        assert file is not None
        files.parts._prepare(file, 0, 4096)
        assert file.partial and file.source.written_to
        files.content.become_whole_if_so(file)
        assert file.whole
        await files.release(fh)

    run_files(small_settings(tmp_path), body)


def test_an_open_that_fails_leaves_the_file_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        ino = await make(files, b"a", DATA)

        def fails(*_: object) -> None:
            raise OSError(errno.EMFILE, "too many")

        with monkeypatch.context() as patch:
            patch.setattr(files.modes, "register", fails)
            with pytest.raises(OSError, match="too many"):
                await files.open(ino, os.O_RDWR)
        file = files.known.get(ino)
        assert file is not None and file.dirty and file.channel is NOT_OPEN
        await files.release(await files.open(ino, os.O_RDWR))

    run_files(small_settings(tmp_path), body)


# -- opens and removals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("published", [False, True])
def test_an_open_waits_for_a_removal_that_was_told_to_go_on(tmp_path: Path, published: bool) -> None:
    """The catalog thread asked, and no open was under way. One that comes before that batch is committed still finds
    the row, and must not take the file: its rows and bytes go."""
    asked, go_on = threading.Event(), threading.Event()

    async def body(files: Files, kernel: FakeKernel) -> None:
        ino = await make(files, b"a", DATA)
        await (publish(files) if published else files.sealer.seal_now())

        def must_stay(one: int) -> bool:
            stays = files.known.must_stay(one)
            asked.set()
            go_on.wait(10)
            return stays

        work = partial(namespace.unlink, parent=top(files.volume), name=b"a", is_open=must_stay)
        future = files.volume.writer.submit(stream_of(ino), work)
        await trio.to_thread.run_sync(asked.wait, 10)
        codes: list[int | None] = []

        async def opens() -> None:
            with pytest.raises(OSError) as caught:
                await files.open(ino, os.O_RDWR)
            codes.append(caught.value.errno)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(opens)
            await trio.sleep(0.1)
            assert not codes
            go_on.set()
        assert codes == [errno.ESTALE]
        row = await result_of(future)
        files.removal.removed(row)
        assert not files.known.is_open(ino) and files.known.get(ino) is None
        await files.volume.evictor.doomed.delete_all()
        if not published:
            assert not any(path.is_file() for path in files.volume.hot.root.rglob("*"))

    run_files(small_settings(tmp_path), body)


@pytest.mark.parametrize("fails", [False, True])
def test_a_removal_that_failed_holds_up_one_open(tmp_path: Path, fails: bool) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        ino = await make(files, b"a", b"x")

        def work(b: Batch) -> None:
            assert not files.known.must_stay(ino)
            if fails:
                raise OSError(errno.ENOSPC, "no room")

        future = files.volume.writer.submit(stream_of(ino), work)
        with pytest.raises(OSError, match="no room") if fails else trio.CancelScope():
            await result_of(future)
        for waits in (True, False):
            with files.known.opening(ino) as going:
                assert going is waits
            await files.release(await files.open(ino, os.O_RDONLY))
        assert row_of(files, ino) is not None

    run_files(small_settings(tmp_path), body)


def test_a_file_that_is_being_opened_is_not_discarded_under_its_opener(tmp_path: Path) -> None:
    """Its last name goes while its first writer waits for the catalog: the file is the opener's until it is closed."""

    async def body(files: Files, kernel: FakeKernel) -> None:
        ino = await make(files, b"a", DATA)
        await publish(files)
        stream_id = stream_of(ino)
        held, go_on = threading.Event(), threading.Event()

        def hold(b: Batch) -> None:
            held.set()
            go_on.wait(10)

        async def opens(task_status: trio.TaskStatus[None]) -> None:
            task_status.started()
            fhs.append(await files.open(ino, os.O_RDWR))

        fhs: list[int] = []
        files.volume.writer.submit(stream_id, hold)
        await trio.to_thread.run_sync(held.wait, 10)
        work = partial(namespace.unlink, parent=top(files.volume), name=b"a", is_open=files.known.must_stay)
        async with trio.open_nursery() as nursery:
            await nursery.start(opens)
            while files.known.get(ino) is None:
                await trio.sleep(0.01)
            unlinked = files.volume.writer.submit(stream_id, work)
            go_on.set()
            files.removal.removed(await result_of(unlinked))
        file = files.known.get(ino)
        assert file is not None and file.unlinked and file.dirty
        await files.release(fhs[0])
        assert files.known.get(ino) is None
        with files.volume.catalog.view() as view:
            assert ino not in namespace.nameless(view, stream_id)

    run_files(small_settings(tmp_path), body)


def test_a_file_that_is_removed_right_after_its_seal_is_given_back_once(tmp_path: Path) -> None:
    """Both commits are in before the sealer comes to tell of its own."""

    async def body(files: Files, kernel: FakeKernel) -> None:
        ino = await make(files, b"a", DATA)
        volume, point = files.volume, files.volume.env.failpoint

        def failpoint(name: str) -> None:
            point(name)
            if name == "seal.recorded":
                work = partial(namespace.unlink, parent=top(volume), name=b"a", is_open=files.known.must_stay)
                files.removal.removed(volume.writer.submit(stream_of(ino), work).result())

        volume.env.failpoint = failpoint  # type: ignore[method-assign]
        await files.sealer.seal_now()
        await volume.evictor.doomed.delete_all()
        assert files.known.get(ino) is None and not files.sealer.waiting
        assert volume.quota.usage.used_bytes == files.known.ledger.bytes == 0

    run_files(small_settings(tmp_path), body)


def test_a_file_that_cannot_be_marked_dirty_stays_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes in of it later is recorded as the object's, and the next writer finds nothing in its way."""

    async def body(files: Files, kernel: FakeKernel) -> None:
        ino = await make(files, b"a", DATA)
        await publish(files)

        def no_room(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "no room")

        fh = await files.open(ino, os.O_RDONLY)
        file = files.known.get(ino)
        assert file is not None
        with monkeypatch.context() as patch:
            patch.setattr("aof2.engine.files.marks.reopen", no_room)
            with pytest.raises(OSError, match="no room"):
                await files.open(ino, os.O_RDWR)
        assert file.state is State.CLEAN and not file.source.written_to
        writer = await files.open(ino, os.O_RDWR)
        assert file.dirty
        for one in (fh, writer):
            await files.release(one)

    run_files(small_settings(tmp_path), body)
