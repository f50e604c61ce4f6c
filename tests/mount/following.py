"""A writer and a follower of one volume, each with a state_dir and a mountpoint of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.mount import TEST_MAX_S, MountedVolume, mounted_volume

FILES = {"default": {"kind": "files"}}


class Pair(NamedTuple):
    writer: MountedVolume
    follower: MountedVolume

    def durable(self, *paths: Path) -> None:
        """As `aof2 wait` says of them."""
        mountpoint = self.writer.mountpoint
        self.writer.ask("wait", paths=[str(path.relative_to(mountpoint)) for path in paths or (self.writer.path,)])

    def there(self, path: Path) -> Path:
        """A path of the writer's mount, in the follower's."""
        return self.follower.mountpoint / path.relative_to(self.writer.mountpoint)


@contextlib.contextmanager
def pair(
    root: Path,
    *,
    options: Sequence[str] = ("follow",),
    mount: bool = True,
    timeout_s: float = TEST_MAX_S,
    **sections: object,
) -> Iterator[Pair]:
    """One remote for both. The follower is mounted where `mount` says so."""
    sections.setdefault("remote", {"url": f"file://{root.resolve() / 'remote'}", "timeout": "5s"})
    given = {"tenants": FILES, "timeout_s": timeout_s, **sections}
    (root / "remote").mkdir(parents=True, exist_ok=True)
    with (
        mounted_volume(root / "w", **given) as writer,  # type: ignore[arg-type]
        mounted_volume(root / "f", options=options, mount=mount, **given) as follower,  # type: ignore[arg-type]
    ):
        yield Pair(writer, follower)


def tree_of(root: Path) -> dict[str, bytes | None]:
    """Paths below it: None of directories, else what is in the file."""
    found: dict[str, bytes | None] = {}
    for path in sorted(root.rglob("*")):
        found[str(path.relative_to(root))] = path.read_bytes() if path.is_file() else None
    return found
