"""The mount.conf in the repository: every key is in it, commented, at its default."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from aof2.engine.kinds.registry import REGISTERED, of_settings
from aof2.engine.settings import Settings, load_settings
from aof2.engine.settings.keys import SECTION_KEYS, SECTIONS
from aof2.engine.settings.model import VolumeSettings

SHIPPED = Path(__file__).parents[2] / "mount.conf"
RAW = msgspec.toml.decode(SHIPPED.read_text())
TENANT_KIND_KEYS = {entry.name: entry.keys for entry in REGISTERED}
TENANT_KINDS = {entry.name: entry.settings for entry in REGISTERED}
TENANTS = {"default": "files", "events": "append", "db": "paged"}


def test_it_is_the_defaults() -> None:
    volume = VolumeSettings(mountpoint=Path("/aof2"), state_dir=Path("/var/lib/aof2"))
    assert load_settings(SHIPPED) == Settings(volume=volume)


def test_it_has_every_section_and_key() -> None:
    assert RAW.keys() == {*SECTION_KEYS, "tenants"}
    for section, keys in SECTION_KEYS.items():
        assert RAW[section].keys() == keys.keys()
    assert {name: tenant["kind"] for name, tenant in RAW["tenants"].items()} == TENANTS
    for name, kind in TENANTS.items():
        assert RAW["tenants"][name].keys() == {"kind", *TENANT_KIND_KEYS[kind]}


@pytest.mark.parametrize("section", [s for s in SECTION_KEYS if s != "volume"])
def test_every_key_is_at_its_default(section: str) -> None:
    defaults = SECTIONS[section]()
    for name, key in SECTION_KEYS[section].items():
        assert key.parse(RAW[section][name]) == getattr(defaults, key.field), name


@pytest.mark.parametrize(("tenant", "kind"), TENANTS.items())
def test_every_tenant_key_is_at_its_default(tenant: str, kind: str) -> None:
    defaults = TENANT_KINDS[kind]()
    assert of_settings(defaults).name == kind
    for name, key in TENANT_KIND_KEYS[kind].items():
        assert key.parse(RAW["tenants"][tenant][name]) == getattr(defaults, key.field), name


def test_every_field_has_a_key() -> None:
    for section, keys in SECTION_KEYS.items():
        assert {key.field for key in keys.values()} == set(SECTIONS[section].__struct_fields__)
    for kind, keys in TENANT_KIND_KEYS.items():
        assert {key.field for key in keys.values()} == set(TENANT_KINDS[kind].__struct_fields__)


def test_every_key_has_a_comment() -> None:
    lines = [line for line in SHIPPED.read_text().splitlines() if "=" in line.split("#")[0]]
    assert len(lines) == sum(map(len, SECTION_KEYS.values())) + sum(len(k) + 1 for k in TENANT_KIND_KEYS.values())
    assert [line for line in lines if not re.search(r"\S +# \S", line)] == []
