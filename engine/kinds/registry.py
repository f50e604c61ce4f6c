"""The tenant kinds there are. A new one: its folder, and its line here.

A kind's settings come with its line; its class is imported when a volume is mounted, because it needs the engine that
in turn reads these settings.

Owner: constant. Numbers are written to disk (`TenantRow.kind`): never renumber.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Final, NamedTuple

from aof2.engine.errors import UnsupportedError
from aof2.engine.settings.keys import APPEND_KEYS, FILES_KEYS, PAGED_KEYS, Key
from aof2.engine.settings.model import AppendTenant, FilesTenant, PagedTenant, TenantSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aof2.engine.kinds.kernel import Kernel
    from aof2.engine.kinds.kind import Kind
    from aof2.engine.kinds.opens import Opens
    from aof2.engine.volume import Volume


class MountWish(NamedTuple):
    """What the mount was asked for, as far as kinds act on it."""

    read_only: bool = False
    passthrough: bool = True
    as_recorded: bool = True  # owners and modes are shown as they are: the channel may answer with them by itself


class Surroundings(NamedTuple):
    """What a kind is made with."""

    volume: Volume
    kernel: Kernel
    opens: Opens
    wish: MountWish
    tenants: Mapping[int, str]  # of this kind, by stream
    made: Mapping[int, Kind] = {}  # kinds with a smaller number, by that


class KindEntry(NamedTuple):
    number: int
    name: str
    settings: type[TenantSettings]
    keys: dict[str, Key]
    module: str
    """Has `make(surroundings) -> Kind` and `recover(volume, stream_ids)`."""

    def make(self, surroundings: Surroundings) -> Kind:
        kind: Kind = import_module(self.module).make(surroundings)
        return kind

    def recover(self, volume: Volume, tenants: Mapping[int, str]) -> None:
        """Brings what a crash left to where it can be served. Blocks; before anything else touches the tenants."""
        recover: Callable[[Volume, Mapping[int, str]], None] = import_module(self.module).recover
        recover(volume, tenants)


REGISTERED: Final = [
    KindEntry(0, "files", FilesTenant, FILES_KEYS, "aof2.engine.files.kind"),
    KindEntry(1, "append", AppendTenant, APPEND_KEYS, "aof2.engine.append.kind"),
    KindEntry(2, "paged", PagedTenant, PAGED_KEYS, "aof2.engine.kinds.empty"),
]
DEFAULT: Final = "files"  # of a tenant whose table names none


def by_name(name: str) -> KindEntry | None:
    return next((entry for entry in REGISTERED if entry.name == name), None)


def by_number(number: int) -> KindEntry:
    """The kind of a tenant on disk. UnsupportedError: this release does not have it."""
    for entry in REGISTERED:
        if entry.number == number:
            return entry
    raise UnsupportedError(f"a tenant is of kind {number}, which this release does not have")


def of_settings(settings: TenantSettings) -> KindEntry:
    return next(entry for entry in REGISTERED if entry.settings is type(settings))
