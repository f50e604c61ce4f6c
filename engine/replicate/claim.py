"""Who may write: this state folder's volume, and the claim on its remote.

`state_dir/volume.json` remembers which volume the folder belongs to, so that a wrong url is noticed and a folder never
takes over a remote that is not its own; and which claim on the remote is the last that this folder knows: its own, or,
in a restored folder, the one that stood when it was restored.

    look: whose claim stands there?     ours, or the one we were restored under → go on; another's → StaleError
    compare: is every log here?         as far as the remote's, with the same bytes → go on; else → StaleError
    claim: the epoch after it

Invariants
- A folder claims only over a claim that it knows, and only with logs that hold all that the remote has (`stale`): an
  old machine that comes back does not push out the writer that took over from it.
- The claim is on the remote before anything else is put. Its name is on the disk before it is sent, so that a claim
  whose answer got lost is known to be ours.
- A folder without identity claims only a remote that holds no manifest objects: an empty state folder pointed at
  another's volume would otherwise push its writer out, and could not even go on with its log.

Owner: the thread that claims; once a mount. A crash between the intention and the claim, or between the claim and what
is remembered of it, leaves an identity that knows both names; one before the first identity leaves a volume without
manifest objects, which the next claim takes.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from aof2.engine.env import Env
from aof2.engine.errors import CorruptError
from aof2.engine.remote.errors import FencedError, RemoteMissingError
from aof2.engine.remote.fence import Fence, VolumeRecord, claim, new_writer_id, read_volume
from aof2.engine.remote.keys import VOLUME_KEY
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.listing import MANIFEST_PREFIX

IDENTITY_NAME: Final = "volume.json"
INTENDED_MAX: Final = 16
CRASH_POINTS: Final = ("replicate.claim.intended", "replicate.claim.claimed", "replicate.claim.remembered")


class StaleError(FencedError):
    """This state folder is not where the volume's log is. Nothing was claimed: its writer goes on undisturbed."""


class TakenOverError(StaleError):
    """The claim that stands on the remote is none that this folder knows."""


class Identity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of the local volume.json. `own`: this folder made the claim `writer_id` itself.

    `intended` are claims that were sent and whose answer was not seen.
    """

    volume_uuid: str
    writer_id: str = ""
    writer_epoch: int = 0
    own: bool = False
    intended: tuple[str, ...] = ()

    def knows(self, record: VolumeRecord) -> bool:
        """Whether that is the last claim this folder made or saw; folders of before know none, and any will do."""
        return not self.writer_id or record.writer_id in (self.writer_id, *self.intended)

    def made(self, record: VolumeRecord) -> bool:
        """Whether this folder made that claim."""
        return (self.own and record.writer_id == self.writer_id) or record.writer_id in self.intended


def load_identity(state_dir: Path) -> Identity | None:
    """What the folder knows of its volume, or None before its first claim."""
    path = state_dir / IDENTITY_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=Identity)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as e:
        raise CorruptError(f"not a volume identity ({e})", path=str(path)) from None


def save_identity(env: Env, state_dir: Path, identity: Identity) -> None:
    env.replace_file(state_dir / IDENTITY_NAME, msgspec.json.encode(identity))


def remember_found(env: Env, state_dir: Path, found: VolumeRecord) -> None:
    """A folder that is made from the remote: it belongs to that volume, as of the claim that stands there."""
    known = Identity(volume_uuid=found.volume_uuid, writer_id=found.writer_id, writer_epoch=found.writer_epoch)
    save_identity(env, state_dir, known)


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What the remote says of the volume's writer, and this folder of its own claims. None: nothing there yet."""

    known: Identity | None
    found: VolumeRecord | None
    etag: str = ""

    @property
    def is_ours(self) -> bool:
        """Nothing but this folder claimed since."""
        return self.known is not None and self.found is not None and self.known.made(self.found)


def look(store: RemoteStore, state_dir: Path, *, timeout_s: float | None = None) -> Standing:
    """Whose claim stands on the remote. StaleError: another's, since this folder's. FencedError: another volume's."""
    known = load_identity(state_dir)
    record, etag = read_volume(store, timeout_s=timeout_s) or (None, "")
    if known is None:
        if record is not None and next(iter(store.list(MANIFEST_PREFIX)), None) is not None:
            raise FencedError(
                f"the remote holds volume {record.volume_uuid}, and this state_dir belongs to none; "
                "use `aof2 restore --from URL`, or another url for a new volume"
            )
        return Standing(known=None, found=record, etag=etag)
    if record is None:
        raise RemoteMissingError(f"{VOLUME_KEY}: the remote holds no volume {known.volume_uuid}; is it the right url?")
    if record.volume_uuid != known.volume_uuid:
        raise FencedError(
            f"{VOLUME_KEY}: the remote holds volume {record.volume_uuid}, this state_dir belongs to {known.volume_uuid}"
        )
    if not known.knows(record):
        raise TakenOverError(f"another machine has taken this volume over since: {claimed_by(record)}")
    return Standing(known=known, found=record, etag=etag)


def claimed_by(record: VolumeRecord) -> str:
    """Who claimed, and when."""
    when = datetime.datetime.fromtimestamp(record.claimed_at_ms / 1000, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    host = f" on {record.host}" if record.host else ""
    return f"writer {record.writer_id[:8]}{host}, epoch {record.writer_epoch}, claimed at {when}"


def take_claim(
    env: Env, store: RemoteStore, state_dir: Path, *, compare: Callable[[Standing], None] | None = None
) -> Fence:
    """Makes this process the volume's writer.

    `compare` raises StaleError where the logs here are not those of the remote. FencedError: it is not this folder's
    volume, or another writer was quicker.
    """
    standing = look(store, state_dir)
    if compare is not None and standing.found is not None:
        compare(standing)
    known, found = standing.known, standing.found
    writer_id = new_writer_id()
    if known is not None:
        intended = (*known.intended, writer_id)[-INTENDED_MAX:]
        save_identity(env, state_dir, msgspec.structs.replace(known, intended=intended))
    env.failpoint("replicate.claim.intended")
    fence = claim(env, store, over=(found, standing.etag) if found is not None else None, writer_id=writer_id)
    env.failpoint("replicate.claim.claimed")
    made = fence.record
    mine = Identity(volume_uuid=made.volume_uuid, writer_id=made.writer_id, writer_epoch=made.writer_epoch, own=True)
    save_identity(env, state_dir, mine)
    env.failpoint("replicate.claim.remembered")
    return fence
