"""mount.conf: what is taken, what is refused, and what the refusal says."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aof2.engine.kinds.registry import REGISTERED
from aof2.engine.manifest.writer import LogSettings
from aof2.engine.settings import Settings, SettingsError, find_conf, load_settings
from aof2.engine.settings.keys import SECTION_KEYS, split_listen
from aof2.engine.settings.model import AppendTenant, EngineSettings, FilesTenant, PagedTenant
from aof2.engine.settings.remote import parse_url
from aof2.engine.units import MinFree

VOLUME = '[volume]\nmountpoint = "/mnt/a"\nstate_dir = "/srv/state"\n'


def load(tmp_path: Path, text: str, volume: str = VOLUME) -> Settings:
    conf = tmp_path / "mount.conf"
    conf.write_text(volume + text)
    return load_settings(conf)


def refusal(tmp_path: Path, text: str, volume: str = VOLUME) -> str:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, text, volume)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'mount.conf'}: ")
    assert message.isprintable()
    return message.removeprefix(f"{tmp_path / 'mount.conf'}: ")


def test_the_volume_is_enough(tmp_path: Path) -> None:
    settings = load(tmp_path, "")
    assert settings == Settings(volume=settings.volume)
    assert settings.volume.mountpoint == Path("/mnt/a")
    assert settings.tenants == {"default": FilesTenant(), "events": AppendTenant(), "db": PagedTenant()}
    assert settings.engine == EngineSettings(chunk_bytes=64 << 20, block_bytes=1 << 20)


def test_every_section_is_read(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        """
        [mount]
        uring = "off"
        [remote]
        url = "s3://bucket.name/some/prefix/"
        endpoint_url = "http://127.0.0.1:8333"
        region = "eu-central-1"
        timeout = "1.5s"
        retries = 0
        parallel = 3
        [cache]
        hot_bytes = "64MiB"
        warm_bytes = 0
        page_cache_bytes = 16777216
        low_water = 1
        min_free = "1GiB"
        cold_scan_bytes_per_s = "1MiB"
        cold_scan_parallel = 1
        scrub_every = ""
        [retention]
        undelete_window = "0s"
        checkpoints = 1
        purge_after = "1min"
        [manifest]
        chunk_capacity = "16KiB"
        rotation_period = "1s"
        commit_period = "1ms"
        durable = false
        enabled = false
        [metrics]
        listen = ""
        [tenants.a-b_9]
        quota = "1GiB"
        compression = "none"
        write_mode = "budget"
        """,
    )
    assert parse_url(settings.remote.url)[:3] == ("s3", "bucket.name", "some/prefix/")
    assert settings.mount.uring == "off"
    assert settings.remote.directory is None
    assert settings.remote.timeout_s == 1.5
    assert settings.cache.min_free == MinFree(size_bytes=1 << 30)
    assert settings.cache.scrub_every_s is None
    assert settings.cache.low_water == 1.0
    assert settings.manifest.rotation_period_ms == 1000
    assert not settings.manifest.durable
    assert settings.metrics.listen == ""
    assert settings.tenants == {"a-b_9": FilesTenant(quota_bytes=1 << 30, compression="none", write_mode="budget")}


def test_relative_paths_start_at_the_conf(tmp_path: Path) -> None:
    volume = '[volume]\nmountpoint = "mnt"\nstate_dir = "./state/../state2"\n'
    settings = load(tmp_path, '[remote]\nurl = "file://remote dir"\n', volume)
    assert settings.volume.mountpoint == tmp_path / "mnt"
    assert settings.volume.state_dir == tmp_path / "state2"
    assert settings.remote.directory == tmp_path / "remote dir"
    assert settings.remote.url == (tmp_path / "remote dir").as_uri()
    assert not any((tmp_path / name).exists() for name in ("mnt", "state2", "remote dir"))


def test_file_urls(tmp_path: Path) -> None:
    for url, path in [
        ("file:///a/b", "/a/b"),
        ("file:///a/b/", "/a/b"),
        ("file://localhost/a", "/a"),
        ("file:///a%20b", "/a b"),
        ("file:///a/../c", "/c"),
    ]:
        assert load(tmp_path, f'[remote]\nurl = "{url}"\n').remote.directory == Path(path)


def test_engine_sizes_are_set_in_code(tmp_path: Path) -> None:
    small = EngineSettings(chunk_bytes=1 << 20, block_bytes=1 << 14)
    (tmp_path / "mount.conf").write_text(VOLUME + '[cache]\nhot_bytes = "1MiB"\nwarm_bytes = "1MiB"\n' + _SEGMENTS)
    settings = load_settings(tmp_path / "mount.conf", engine=small)
    assert settings.engine == small
    assert msgspec.structs.replace(settings, engine=EngineSettings()).engine.chunk_bytes == 64 << 20


_SEGMENTS = '[tenants.e]\nkind = "append"\nsegment_bytes = "1MiB"\n'


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[cach]", "[cach]: no such key; did you mean cache?"),
        ("[cache]\nhot_byte = 1", "cache.hot_byte: no such key; did you mean hot_bytes?"),
        ("[engine]\nchunk_bytes = 1", "[engine]: no such key; there are volume, mount, remote, cache"),
        ("[metrics]\nqqq = 1", "metrics.qqq: no such key; there are listen"),
        ("[volume.x]", "volume.x: no such key"),
        ("[cache]\nlow_water = 1.5", "cache.low_water = 1.5: it must be a number above 0 and at most 1"),
        ("[cache]\nlow_water = 0", "cache.low_water = 0: it must be"),
        ("[cache]\nlow_water = nan", "cache.low_water = nan: it must be"),
        ("[cache]\nlow_water = true", "cache.low_water = true: it must be"),
        ('[cache]\nlow_water = "90%"', 'cache.low_water = "90%": it must be'),
        ('[cache]\nhot_bytes = "20GB"', 'cache.hot_bytes = "20GB": it must be a size such as 64MiB (B, KiB'),
        ('[cache]\nhot_bytes = "63MiB"', 'cache.hot_bytes = "63MiB": it must be at least 64MiB: one chunk'),
        ('[cache]\nwarm_bytes = "1MiB"', 'cache.warm_bytes = "1MiB": it must be 0 (no warm tier) or at least 64MiB'),
        ('[cache]\npage_cache_bytes = "15MiB"', 'cache.page_cache_bytes = "15MiB": it must be 16MiB to 1TiB'),
        ('[cache]\nmin_free = "100%"', 'cache.min_free = "100%": it must be a share of the disk'),
        ("[cache]\ncold_scan_parallel = 0", "cache.cold_scan_parallel = 0: it must be a whole number, 1 to 256"),
        ('[cache]\nscrub_every = "1s"', 'cache.scrub_every = "1s": it must be 1min to 3650d, or "" for none'),
        ("[remote]\ntimeout = 30", "remote.timeout = 30: it must be a time such as 30s"),
        ('[remote]\nretries = "5"', 'remote.retries = "5": it must be a whole number'),
        ("[remote]\nretries = 5.0", "remote.retries = 5.0: it must be a whole number"),
        ('[remote]\nurl = "/srv/x"', 'remote.url = "/srv/x": it must be file:///directory or s3://bucket/prefix'),
        ('[remote]\nurl = "http://x/y"', "remote.url = "),
        ('[remote]\nurl = "s3://"', "remote.url = "),
        ('[remote]\nurl = "s3://Bad_Bucket/x"', "remote.url = "),
        ('[remote]\nurl = "s3://key:secret@bucket/x"', "remote.url = "),
        ('[remote]\nurl = "file://"', "remote.url = "),
        ('[remote]\nurl = "file:///a%00b"', "remote.url = "),
        ('[remote]\nendpoint_url = "localhost:8333"', "remote.endpoint_url = "),
        ('[remote]\nendpoint_url = "http://h:1"', 'remote.endpoint_url = "http://h:1": it goes with an s3:// url'),
        ('[manifest]\nchunk_capacity = "8KiB"', 'manifest.chunk_capacity = "8KiB": it must be 16KiB to 1MiB'),
        ('[manifest]\nchunk_capacity = "2MiB"', "manifest.chunk_capacity = "),
        ('[manifest]\nrotation_period = "0ms"', 'manifest.rotation_period = "0ms": it must be 1ms to 1h'),
        ('[manifest]\nenabled = "yes"', 'manifest.enabled = "yes": it must be true or false'),
        ('[metrics]\nlisten = "9464"', 'metrics.listen = "9464": it must be host:port'),
        ('[metrics]\nlisten = "h:65536"', "metrics.listen = "),
        ("[metrics]\nlisten = 9464", "metrics.listen = 9464: it must be host:port"),
        ("[mount]\nuring = true", 'mount.uring = true: it must be "auto" or "off"'),
        ("[retention]\ncheckpoints = 0", "retention.checkpoints = 0: it must be"),
        ("[tenants.Big]", "[tenants.Big]: a tenant's name must match [a-z0-9_-]{1,64}"),
        ('[tenants."a/b"]', "[tenants.a/b]: a tenant's name must match"),
        ('[tenants."a\\nb"]', "[tenants.a\\nb]: a tenant's name must match"),
        (f"[tenants.{'a' * 65}]", "[tenants.aaa"),
        ('[tenants.x]\nkind = "queue"', 'tenants.x.kind = "queue": it must be "files" or "append" or "paged"'),
        ("[tenants.x]\nkind = []", "tenants.x.kind = []: it must be"),
        ("[tenants]", "tenants = {}: it must be one table a tenant"),
        ("[tenants]\nx = 1", "tenants.x = 1: it must be a table: [tenants.x]"),
        ('[tenants.x]\next = "a"', 'tenants.x.ext = "a": a key of kind "append", but tenants.x.kind is "files"'),
        ("[tenants.x]\nwritemode = 1", "tenants.x.writemode: no such key; did you mean write_mode?"),
        ('[tenants.x]\nwrite_mode = "fast"', 'it must be "auto" or "passthrough" or "budget"'),
        ('[tenants.x]\ncompression = "lz4"', 'tenants.x.compression = "lz4": it must be "zstd" or "none"'),
        ('[tenants.x]\nquota = "1MiB"', 'tenants.x.quota = "1MiB": it must be at least 64MiB (one chunk), or ""'),
        ('[tenants.x]\nquota = "lots"', 'tenants.x.quota = "lots": it must be a size'),
        ('[tenants.x]\nkind = "append"\next = ".log"', 'tenants.x.ext = ".log": it must be 1 to 16 letters and digits'),
        ('[tenants.x]\nkind = "append"\nsegment_bytes = "65MiB"', "it must be at most 64MiB: a sealed segment is one"),
        ('[tenants.x]\nkind = "append"\nsegment_bytes = "1KiB"', 'segment_bytes = "1KiB": it must be 4KiB to'),
        (
            '[tenants.x]\nkind = "paged"\npage_bytes = 5000',
            "page_bytes = 5000: it must be a power of two, 512B to 64KiB",
        ),
        ('[tenants.x]\nkind = "paged"\npage_bytes = 0', "page_bytes = 0: it must be a power of two"),
        ('[tenants.x]\nkind = "paged"\ndelta_threshold = 0.0', "delta_threshold = 0.0: it must be a number above 0"),
    ],
)
def test_a_refusal_names_key_value_and_what_is_allowed(tmp_path: Path, text: str, line: str) -> None:
    assert line in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("volume", "line"),
    [
        ("", "volume.mountpoint is missing; it must be a path (and 1 more)"),
        ("volume = 3\n", "volume = 3: it must be a table: [volume]"),
        ('[volume]\nmountpoint = "/a"\n', "volume.state_dir is missing"),
        ('[volume]\nmountpoint = ""\nstate_dir = "/s"\n', 'volume.mountpoint = "": it must be a path'),
        ('[volume]\nmountpoint = 1\nstate_dir = "/s"\n', "volume.mountpoint = 1: it must be a path"),
        ('[volume]\nmountpoint = "/"\nstate_dir = "/s"\n', 'volume.mountpoint = "/": it must be a folder of its own'),
    ],
)
def test_the_volume_is_required(tmp_path: Path, volume: str, line: str) -> None:
    assert line in refusal(tmp_path, "", volume)


@pytest.mark.parametrize(
    ("mountpoint", "state_dir", "remote", "line"),
    [
        ("/m", "/m/s", "/r", 'volume.state_dir = "/m/s": it lies in volume.mountpoint (/m)'),
        ("/m", "/m", "/r", 'volume.state_dir = "/m": it is the same as volume.mountpoint'),
        ("/m", "/s", "/m/r", 'remote.url = "/m/r": it lies in volume.mountpoint (/m)'),
        ("/s/m", "/s", "/r", 'volume.state_dir = "/s": it contains volume.mountpoint (/s/m)'),
        ("/m", "/s", "/s/r", 'remote.url = "/s/r": it lies in volume.state_dir (/s)'),
        ("/m", "/r/s", "/r", 'remote.url = "/r": it contains volume.state_dir (/r/s)'),
        ("/m", "/r", "/r", 'remote.url = "/r": it is the same as volume.state_dir'),
        ("/r/m", "/s", "/r", 'remote.url = "/r": it contains volume.mountpoint (/r/m)'),
        ("/m", "/x/../m/s", "/r", "it lies in volume.mountpoint (/m)"),
    ],
)
def test_places_are_apart(tmp_path: Path, mountpoint: str, state_dir: str, remote: str, line: str) -> None:
    volume = f'[volume]\nmountpoint = "{mountpoint}"\nstate_dir = "{state_dir}"\n'
    assert line in refusal(tmp_path, f'[remote]\nurl = "file://{remote}"\n', volume)


def test_names_that_only_begin_alike_are_apart(tmp_path: Path) -> None:
    volume = '[volume]\nmountpoint = "/m"\nstate_dir = "/m-state"\n'
    assert load(tmp_path, '[remote]\nurl = "file:///m-state-remote"\n', volume)


def test_a_symlink_does_not_hide_an_overlap(tmp_path: Path) -> None:
    (tmp_path / "mnt" / "inner").mkdir(parents=True)
    (tmp_path / "elsewhere").symlink_to(tmp_path / "mnt" / "inner")
    volume = '[volume]\nmountpoint = "mnt"\nstate_dir = "elsewhere"\n'
    assert "it lies in volume.mountpoint" in refusal(tmp_path, "", volume)


def test_every_problem_is_found(tmp_path: Path) -> None:
    (tmp_path / "mount.conf").write_text(VOLUME + "[cache]\nlow_water = 2\nhot = 1\n[metrics]\nlisten = 1\n")
    with pytest.raises(SettingsError) as caught:
        load_settings(tmp_path / "mount.conf")
    assert [p.split(": ")[1].split(" ")[0] for p in caught.value.problems] == [
        "cache.low_water", "cache.hot", "metrics.listen",
    ]  # fmt: skip
    assert str(caught.value).endswith("(and 2 more)")


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"[volume", "not TOML: "),
        (b"a = 1\na = 2\n", "not TOML: "),
        (b"\xff\xfe", "not TOML: "),
        (b"a = " + b"[" * 100_000, "not TOML: "),
        (b"#" * ((1 << 20) + 1), "over 1MiB"),
        (b"\xef\xbb\xbf" + VOLUME.encode() + b"[x]", "[x]: no such key"),
    ],
)
def test_what_is_no_conf(tmp_path: Path, data: bytes, line: str) -> None:
    conf = tmp_path / "mount.conf"
    conf.write_bytes(data)
    with pytest.raises(SettingsError, match="^" + str(conf)) as caught:
        load_settings(conf)
    assert line in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_conf_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no such file or directory; name a conf"):
        load_settings(tmp_path / "none.conf")
    with pytest.raises(SettingsError, match="is a directory"):
        load_settings(tmp_path)


def test_which_conf_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AOF2_CONF", raising=False)
    system = tmp_path / "etc.conf"
    monkeypatch.setattr("aof2.engine.settings.loader.CONF_SYSTEM", system)
    with pytest.raises(SettingsError, match=r"no mount.conf here and no .*etc.conf; write one, or name it with --conf"):
        find_conf()
    system.touch()
    assert find_conf() == system
    (tmp_path / "mount.conf").touch()
    assert find_conf(None) == Path("mount.conf")
    other = tmp_path / "other.conf"
    monkeypatch.setenv("AOF2_CONF", str(other))
    with pytest.raises(SettingsError, match=r"other.conf: no such file \(named by \$AOF2_CONF\)"):
        find_conf()
    other.touch()
    assert find_conf() == other
    assert find_conf("mount.conf") == Path("mount.conf")
    with pytest.raises(SettingsError, match=r"gone.conf: no such file \(named by --conf\)"):
        find_conf("gone.conf")


@pytest.mark.parametrize("capacity", ["16KiB", "256KiB", "1MiB"])
def test_the_log_takes_what_the_conf_allows(tmp_path: Path, capacity: str) -> None:
    manifest = load(tmp_path, f'[manifest]\nchunk_capacity = "{capacity}"\nrotation_period = "1ms"\n').manifest
    assert LogSettings(
        chunk_capacity=manifest.chunk_capacity_bytes,
        rotation_period_ms=manifest.rotation_period_ms,
        durable=manifest.durable,
    )


def test_listen_addresses() -> None:
    assert split_listen("127.0.0.1:9464") == ("127.0.0.1", 9464)
    assert split_listen("localhost:0") == ("localhost", 0)
    assert split_listen("[::1]:80") == ("::1", 80)
    for text in ("", ":80", "a:", "::1:80", "http://a:80", "a:b", "a:-1", "u@h:1", "a b:1", "[]:1"):
        with pytest.raises(ValueError):
            split_listen(text)


_VALUES = st.one_of(
    st.text(max_size=20),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["kind", "a"]), st.text(max_size=3), max_size=2),
)
_KEYS = [(s, k) for s, keys in SECTION_KEYS.items() for k in keys]
_KEYS += [(f"tenants.{entry.name}", k) for entry in REGISTERED for k in entry.keys]


@given(st.sampled_from(_KEYS), _VALUES)
def test_any_value_is_taken_or_refused_on_a_line(tmp_path: Path, where: tuple[str, str], value: object) -> None:
    section, key = where
    raw: dict[str, dict[str, object]] = {"volume": {"mountpoint": "/mnt/a", "state_dir": "/srv/state"}}
    if section.startswith("tenants."):
        kind = section.removeprefix("tenants.")
        raw["tenants"] = {kind: {"kind": kind, key: value}}
    else:
        raw.setdefault(section, {})[key] = value
    conf = tmp_path / "mount.conf"
    conf.write_text(_toml(raw))
    try:
        settings = load_settings(conf)
    except SettingsError as e:
        assert f"{section}.{key}" in str(e)
        assert str(e).isprintable()
    else:
        assert isinstance(settings, Settings)


def _toml(raw: dict[str, dict[str, object]]) -> str:
    return "".join(f"{name} = {_inline(table)}\n" for name, table in raw.items())


def _inline(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return '"' + "".join(c if c.isalnum() and c.isascii() else f"\\U{ord(c):08X}" for c in value) + '"'
        case dict():
            return "{" + ", ".join(f"{_inline(k)} = {_inline(v)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_inline, value)) + "]"
        case _:
            return str(value)
