"""Mounts that the tests of this folder share, and the plain directory they are held against.

Most tests take `folder` and run three times: in a plain directory of this machine, which proves the test, and in the
mount with files passed through and with files in ranged mode. What is AOF2's own is tested in `here`, in the mount
only. At the end of the session nothing must have been logged that somebody would have to read, and the volume, once
unmounted, must verify clean.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from tests.support.mount import MountedVolume, mounted_volume

_count = itertools.count(1)
IS_ROOT = os.geteuid() == 0
# A user without privileges has ranged mode only, and his mounts have neither suid nor devices nor guests.
MODES = {"passthrough": (), "ranged": ("nopassthrough",)} if IS_ROOT else {"ranged": ()}
OPTIONS = ["allow_other,suid,dev"] if IS_ROOT else []
# Root proves the tests on a plain directory; as a user they run in the mount alone.
FOLDERS = ["plain", *MODES] if IS_ROOT else list(MODES)
# These become other users, give files away, make devices or drop the kernel's caches.
ROOT_ONLY = frozenset(
    (
        "test_a_descriptor_writes_though_the_mode_forbids_it",
        "test_a_directory_keeps_its_bits_when_it_changes_hands",
        "test_a_new_file_belongs_to_who_made_it",
        "test_a_new_owner_inherits_no_suid",
        "test_a_read_takes_nothing_away",
        "test_a_walk_sees_what_is_there",
        "test_access_says_what_open_does",
        "test_another_users_change_takes_capabilities_away",
        "test_another_users_change_takes_suid_away",
        "test_another_users_write_after_the_owner_set_it",
        "test_as_a_user",
        "test_as_root",
        "test_capabilities",
        "test_chown_rules",
        "test_devices",
        "test_dot_aof2_is_the_owners",
        "test_names_that_are_not_there",
        "test_only_the_owner_changes_the_mode",
        "test_options",
        "test_others_permissions",
        "test_roots_write_leaves_suid",
        "test_set_get_list_remove",  # trusted.*
        "test_setgid_directory_hands_its_group_down",
        "test_setgid_outside_ones_groups_is_dropped",
        "test_sticky",
        "test_suid_works_when_asked_for",
        "test_views_are_read_only",  # the mode forbids it first: EACCES
        "test_what_changes_on_the_way_is_seen",
        "test_what_moves_a_files_times",  # by chown, too
        "test_who_may",
    )
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not IS_ROOT:
        for item in items:
            if getattr(item, "originalname", item.name) in ROOT_ONLY:
                item.add_marker(pytest.mark.skip(reason="it takes root"))


@pytest.fixture(scope="session")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, MountedVolume]]:
    """One mount a mode. suid and devices are allowed, as on a disk that root mounts."""
    root = tmp_path_factory.mktemp("posix")
    root.chmod(0o755)

    def mounted(mode: str) -> AbstractContextManager[MountedVolume]:
        return mounted_volume(root / mode, options=[*OPTIONS, *MODES[mode]], timeout_s=0)

    with ExitStack() as stack:
        made = {mode: stack.enter_context(mounted(mode)) for mode in MODES}
        yield made
        for volume in made.values():
            if volume.pids():
                with volume.deadline():
                    assert not volume.complaints()
                    volume.umount()
                    verified = volume.aof2("verify", "--remote")
                    assert not verified.returncode, verified.stdout + verified.stderr
                    assert not volume.complaints()


@pytest.fixture
def volume(volumes: dict[str, MountedVolume]) -> Iterator[MountedVolume]:
    """The mount with passthrough, if the kernel has it and the user may."""
    one = volumes[next(iter(MODES))]
    with one.deadline():
        yield one


@pytest.fixture(params=list(MODES))
def each_volume(request: pytest.FixtureRequest, volumes: dict[str, MountedVolume]) -> Iterator[MountedVolume]:
    with volumes[request.param].deadline():
        yield volumes[request.param]


def _fresh(above: Path) -> Path:
    path = above / f"t{next(_count)}"
    path.mkdir()
    path.chmod(0o755)
    return path


@pytest.fixture
def here(volume: MountedVolume) -> Path:
    """A new directory in the mount."""
    return _fresh(volume.path)


@pytest.fixture
def each_here(each_volume: MountedVolume) -> Path:
    return _fresh(each_volume.path)


@pytest.fixture(params=FOLDERS)
def folder(
    request: pytest.FixtureRequest, volumes: dict[str, MountedVolume], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A new directory: of this machine's disk, then in each mount."""
    if request.param == "plain":
        yield _fresh(tmp_path_factory.getbasetemp())
        return
    with volumes[request.param].deadline():
        yield _fresh(volumes[request.param].path)
