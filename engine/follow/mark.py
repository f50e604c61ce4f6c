"""`follower.json` in a state folder: it follows a volume, under this name. Without it the folder is a writer's.

Invariants
- It is there, durably, before anything else of a follower is, and goes last where the folder becomes a writer's
  (`takeover.py`).

Owner: the thread that opens the volume, under the folder's lock. A crash leaves the mark before or after a change.
"""

from __future__ import annotations

import secrets
import socket
from pathlib import Path
from typing import Final

import msgspec

from aof2.engine.env import Env
from aof2.engine.errors import CorruptError, ReadOnlyError
from aof2.engine.replicate.claim import load_identity

MARK_NAME: Final = "follower.json"
OWN_DIR: Final = "own"  # its own logs (`ownlog.py`)


def own_dir_of(state_dir: Path, stream_id: int) -> Path:
    return state_dir / OWN_DIR / str(stream_id)


class FollowerMark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of follower.json. `taking`: it is becoming the writer's; its own rows are in `own/`, not in the log
    yet."""

    id: str
    host: str
    since_ms: int
    taking: bool = False


def load_mark(state_dir: Path) -> FollowerMark | None:
    """The folder's mark; None: it is a writer's, or new."""
    path = state_dir / MARK_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=FollowerMark)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as e:
        raise CorruptError(f"not a follower's mark ({e})", path=str(path)) from None


def save_mark(env: Env, state_dir: Path, mark: FollowerMark) -> None:
    env.replace_file(state_dir / MARK_NAME, msgspec.json.encode(mark))


def remove_mark(env: Env, state_dir: Path) -> None:
    env.files.unlink(state_dir / MARK_NAME)
    env.files.fsync_dir(state_dir)


def ensure_mark(env: Env, state_dir: Path) -> FollowerMark:
    """The mark of a folder that is to follow; made where the folder is new. ReadOnlyError: it is a writer's."""
    found = load_mark(state_dir)
    if found is not None and found.taking:
        raise ReadOnlyError(
            f"{state_dir}: this follower was becoming the volume's writer; finish that with `aof2 mount`, "
            "without -o follow"
        )
    if found is not None:
        return found
    if load_identity(state_dir) is not None or (state_dir / "manifest").exists():
        raise ReadOnlyError(
            f"{state_dir}: this state_dir is a writer's, a follower has one of its own; "
            "name another in the conf, or mount without -o follow"
        )
    mark = FollowerMark(id=secrets.token_hex(8), host=socket.gethostname(), since_ms=env.now_ms())
    save_mark(env, state_dir, mark)
    return mark
