"""Keys and URLs: built as the seeds spell them, parsed back, and refused with a reason."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aof2.engine.env import Env
from aof2.engine.manifest.format import bundle_key, chunk_key
from aof2.engine.remote import keys as k
from aof2.engine.remote.open import open_remote
from aof2.engine.settings.remote import RemoteSettings, parse_url

SHA = hashlib.sha256(b"abc").digest()
HEX = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"

NAMES = [
    (
        k.chunk_blob_key("db", 7, 12, 3, SHA),
        f"checkpoints/db/7/chunk-12-3-{HEX}.blob",
        k.ChunkBlobKey("db", 7, 12, 3, SHA),
    ),
    (
        k.name_of(k.DeltaBlobKey("db", 7, 12, 5, 3, SHA)),
        f"checkpoints/db/7/delta-12-5-3-{HEX}.blob",
        k.DeltaBlobKey("db", 7, 12, 5, 3, SHA),
    ),
    (k.pack_key("db", 7, 12, SHA), f"checkpoints/db/7/pack-12-{HEX}.blob", k.PackKey("db", 7, 12, SHA)),
    (
        k.name_of(k.SnapshotMetaKey("a-b_c", 9, SHA)),
        f"snapshots/a-b_c/9/meta-{HEX}.json",
        k.SnapshotMetaKey("a-b_c", 9, SHA),
    ),
    (k.manifest_snapshot_key(2, 0), "manifest/2/snapshot_0.bin", k.ManifestSnapshotKey(2, 0)),
    (chunk_key(2, 40), "manifest/2/40.mlog", k.ManifestChunkKey(2, 40)),
    (bundle_key(2, 0, 39), "manifest/2/bundle-0-39.mlogs", k.ManifestBundleKey(2, 0, 39)),
    (k.audit_range_key(3, 1), "audit/3/1.asl", k.AuditRangeKey(3, 1)),
    (k.VOLUME_KEY, "volume.json", k.VolumeKey()),
]


@pytest.mark.parametrize(("built", "text", "parsed"), NAMES, ids=[n[1][:24] for n in NAMES])
def test_names_are_the_specified_ones(built: str, text: str, parsed: k.RemoteKey) -> None:
    assert built == text
    assert k.parse_key(text) == parsed
    assert type(k.parse_key(text)) is type(parsed)
    assert k.name_of(parsed) == text
    assert k.check_key(text) == text


U64 = st.integers(0, 2**64 - 1)
TENANT = st.from_regex(r"[a-z0-9_-]{1,64}", fullmatch=True)


@given(TENANT, U64, U64, U64, U64, st.binary(min_size=32, max_size=32))
def test_blob_names_come_back(tenant: str, a: int, b: int, c: int, d: int, sha: bytes) -> None:
    pack = k.PackKey(tenant, a, b, sha)
    for parsed in (k.ChunkBlobKey(tenant, a, b, c, sha), k.DeltaBlobKey(tenant, a, b, c, d, sha), pack):
        assert k.parse_key(k.name_of(parsed)) == parsed
        assert k.is_pack(k.name_of(parsed)) == (parsed is pack)
    assert k.name_of(k.ChunkBlobKey(tenant, a, b, c, sha)).startswith(f"checkpoints/{tenant}/{a}/")


@given(
    st.text(max_size=80) | st.from_regex(r"(checkpoints|manifest|audit|snapshots)/[a-z0-9/._-]{0,90}", fullmatch=True)
)
def test_whatever_parses_is_built_again_as_it_was(text: str) -> None:
    parsed = k.parse_key(text)
    if parsed is not None:
        assert k.name_of(parsed) == text


@pytest.mark.parametrize(
    "text",
    [
        f"checkpoints/DB/7/chunk-12-3-{HEX}.blob",
        f"checkpoints/db/07/chunk-12-3-{HEX}.blob",
        f"checkpoints/db/7/chunk-12-3-{HEX.upper()}.blob",
        f"checkpoints/db/7/chunk-12-3-{HEX}.blob\n",
        f"checkpoints/db/7/chunk-12-3-{HEX[:-1]}.blob",
        f"checkpoints/db/{2**64}/chunk-12-3-{HEX}.blob",
        "manifest/2/040.mlog",
        "manifest/2/40.mlog.tmp",
        "audit/-1/1.asl",
        "volume.json.bak",
        "",
    ],
)
def test_other_names_are_not_ours(text: str) -> None:
    assert k.parse_key(text) is None


def test_builders_refuse_what_would_not_parse() -> None:
    for call in (
        lambda: k.chunk_blob_key("../x", 1, 1, 1, SHA),
        lambda: k.chunk_blob_key("T", 1, 1, 1, SHA),
        lambda: k.chunk_blob_key("t", -1, 1, 1, SHA),
        lambda: k.chunk_blob_key("t", 1, 2**64, 1, SHA),
        lambda: k.chunk_blob_key("t", 1, 1, 1, b"short"),
    ):
        with pytest.raises(ValueError):
            call()


def test_urls() -> None:
    assert parse_url("s3://b-1/some/prefix/") == ("s3", "b-1", "some/prefix/", Path())
    assert parse_url("s3://b") == ("s3", "b", "", Path())
    assert parse_url("file:///var/lib/x%20y") == ("file", "", "", Path("/var/lib/x y"))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "x",
        "http://h/b",
        "s3://",
        "s3:///p",
        "s3://b/a//c",
        "s3://b/../c",
        "s3://b?x=1",
        "file://host/p",
        "file:p",
        "file:///",
        "file:///a/../b",
        "s3://b ad/",
        "s3://[",
        "file:///a%00b",
    ],
)
def test_a_bad_url_names_key_value_and_what_is_allowed(url: str) -> None:
    with pytest.raises(ValueError, match=r"remote\.url = .*allowed is file:///absolute/path or s3://bucket") as e:
        RemoteSettings(url)
    assert f'"{url}"' in str(e.value)


def test_credentials_in_a_url_are_not_repeated() -> None:
    for settings in ({"url": "s3://KEY:SECRET@b/p"}, {"url": "s3://b", "endpoint_url": "http://KEY:SECRET@h"}):
        with pytest.raises(ValueError, match="remote") as e:
            RemoteSettings(**settings)
        assert "SECRET" not in str(e.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("timeout_s", 0),
        ("retries", -1),
        ("parallel", 0),
        ("parallel", 257),
        ("endpoint_url", "host:1"),
        ("endpoint_url", "ftp://h"),
    ],
)
def test_a_bad_setting_names_its_key(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"remote\.{key.removesuffix('_s')} = "):
        RemoteSettings("s3://b", **{key: value})  # type: ignore[arg-type]


def test_settings_are_data() -> None:
    settings = msgspec.convert({"url": "file:///x", "retries": 2}, RemoteSettings)
    assert settings == RemoteSettings("file:///x", retries=2)


def test_a_bad_region_names_its_key() -> None:
    with pytest.raises(ValueError, match=r"remote\.region = "):
        open_remote(Env(), RemoteSettings("s3://some-bucket", region="not a region!"))


def test_opening_s3_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    open_remote(Env(), RemoteSettings("s3://some-bucket")).close()
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    open_remote(Env(), RemoteSettings("s3://some-bucket", region="eu-west-1")).close()
