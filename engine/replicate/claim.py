"""Who may write: this state folder's volume, and the claim on its remote.

`state_dir/volume.json` remembers which volume the folder belongs to, so that a wrong url is noticed and a folder never
takes over a remote that is not its own.

Invariants
- The claim is on the remote before the identity is on the disk, and both before anything else is put.
- A folder without identity claims only a remote that holds no manifest objects: an empty state folder pointed at
  somebody's volume would otherwise push its writer out, and could not even go on with its log.

Owner: the thread that claims; once a mount. A crash between the claim and the identity leaves a volume without
manifest objects, which the next claim takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from aof2.engine.env import Env
from aof2.engine.errors import CorruptError
from aof2.engine.remote.errors import FencedError
from aof2.engine.remote.fence import Fence, claim, read_volume
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.listing import MANIFEST_PREFIX

IDENTITY_NAME: Final = "volume.json"
CRASH_POINTS: Final = ("replicate.claim.claimed", "replicate.claim.remembered")


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the local volume.json."""

    volume_uuid: str


def read_identity(state_dir: Path) -> str | None:
    """The volume this folder belongs to, or None before its first claim."""
    path = state_dir / IDENTITY_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=Identity).volume_uuid
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as e:
        raise CorruptError(f"not a volume identity ({e})", path=str(path)) from None


def write_identity(env: Env, state_dir: Path, volume_uuid: str) -> None:
    env.replace_file(state_dir / IDENTITY_NAME, msgspec.json.encode(Identity(volume_uuid=volume_uuid)))


def take_claim(env: Env, store: RemoteStore, state_dir: Path) -> Fence:
    """Makes this process the volume's writer. FencedError: it is not this folder's volume, or somebody was quicker."""
    known = read_identity(state_dir)
    if known is None:
        _refuse_foreign(store)
    fence = claim(env, store, expected_uuid=known)
    env.failpoint("replicate.claim.claimed")
    if known is None:
        write_identity(env, state_dir, fence.record.volume_uuid)
        env.failpoint("replicate.claim.remembered")
    return fence


def _refuse_foreign(store: RemoteStore) -> None:
    found = read_volume(store)
    if found is not None and next(iter(store.list(MANIFEST_PREFIX)), None) is not None:
        raise FencedError(
            f"the remote holds volume {found[0].volume_uuid}, and this state_dir belongs to none; "
            "use `aof2 restore --from URL`, or another url for a new volume"
        )
