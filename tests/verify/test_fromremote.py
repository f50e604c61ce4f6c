"""The remote verified without the volume's disk: what `verify --remote` says of it, for ten kinds of faults."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from aof2.engine.errors import Aof2Error
from aof2.engine.settings import Settings
from aof2.engine.verify.findings import Exit, Kind, Report
from aof2.engine.verify.fromremote import verify_remote
from aof2.engine.verify.run import verify
from tests.engine.helpers import small_settings
from tests.verify.faults import FAULTS, copied, finds, here, make_volume, told, wrong


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return make_volume(tmp_path_factory.mktemp("faults"))


def both(settings: Settings) -> tuple[Report, Report]:
    return verify(settings, deep_remote=True, jobs=2), verify_remote(settings, here)


def test_a_whole_volume_is_clean(template: Settings) -> None:
    local, remote = both(template)
    assert wrong(local) == wrong(remote) == []
    assert (local.exit_code, remote.exit_code) == (Exit.CLEAN, Exit.CLEAN)
    assert (remote.blobs, remote.remote_bytes) == (local.blobs, local.remote_bytes)
    assert remote.blobs > 20
    assert remote.objects == local.objects


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("seed", [1, 2])
def test_each_fault_is_found_alike(template: Settings, tmp_path: Path, kind: str, seed: int) -> None:
    settings = copied(template, tmp_path)
    fault = FAULTS[kind](settings, random.Random(seed))
    local, remote = both(settings)
    assert told(remote, fault) == told(local, fault), fault
    assert finds(remote, fault), fault
    assert (local.exit_code, remote.exit_code) == (Exit.LEFT, Exit.LEFT)


def test_there_is_no_volume(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)
    with pytest.raises(Aof2Error, match=r"volume\.json"):
        verify_remote(settings, here)
    assert settings.remote.directory is not None
    settings.remote.directory.rmdir()
    with pytest.raises(Aof2Error, match="no such folder"):
        verify_remote(settings, here)


def test_several_faults_at_once(template: Settings, tmp_path: Path) -> None:
    settings = copied(template, tmp_path)
    made = [FAULTS[kind](settings, random.Random(7)) for kind in ("blob", "pack member", "extra object", "audit")]
    _, remote = both(settings)
    assert {(f.kind, f.key) for f in wrong(remote)} == {(fault.kind, fault.key) for fault in made}
    assert not any(f.kind is Kind.REMOTE_UNREACHABLE for f in remote.findings)
