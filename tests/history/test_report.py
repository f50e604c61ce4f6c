"""`aof2 report`: the numbers of a day of traffic, what-if against what was measured, and the page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from aof2.engine.units import parse_size
from tests.cli.logs import run
from tests.engine.helpers import small_settings
from tests.history.traffic import run_day

pytest.importorskip("numpy", reason="the report extra is not installed")
pytest.importorskip("plotly", reason="the report extra is not installed")

HOT_BYTES = 1 << 20
READS = 250
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a volume that had a day of traffic, and its mount.conf."""
    root = tmp_path_factory.mktemp("day")
    run_day(small_settings(root, compression="none"), hot_bytes=HOT_BYTES, reads=READS)
    lines = [
        f'[volume]\nmountpoint = "{root}/mnt"\nstate_dir = "{root}/state"',
        f'[remote]\nurl = "file://{root}/remote"',
        '[cache]\nhot_bytes = "64MiB"\npage_cache_bytes = "16MiB"',
        '[tenants.default]\nkind = "files"',
    ]
    (root / "mount.conf").write_text("\n".join(lines) + "\n")
    return root


def numbers(day: Path, *options: str) -> dict:
    result = run("report", "--json", "--conf", day / "mount.conf", *options)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_what_if_at_the_size_in_use_is_what_was_measured(day: Path) -> None:
    found = numbers(day, "--what-if", "hot_bytes=1MiB", "--what-if", "hot_bytes=64MiB")
    measured = found["measured"]
    assert measured["uses"] == READS
    assert measured["missed"] == found["totals"]["misses"]
    assert found["hit_rate"] == 1 - measured["missed"] / READS
    assert 0.3 < found["hit_rate"] < 0.95
    same = found["what_if"][0]
    assert same["hot_bytes"] == HOT_BYTES
    assert same["measured_hits"] == READS - measured["missed"]
    assert abs(same["hits"] - same["measured_hits"]) <= READS // 50
    assert sorted(found["asked"]) == [1 << 20, 64 << 20]


def test_a_larger_cache_has_more_hits_and_one_that_holds_all_misses_nothing(day: Path) -> None:
    found = numbers(day, "--what-if", "hot_bytes=64MiB")
    by_size = sorted((one["hot_bytes"], one["hits"]) for one in found["what_if"])
    assert len(by_size) >= 6
    hits = [hits for _, hits in by_size]
    assert hits == sorted(hits)
    assert hits[0] < hits[-1] == READS


def test_the_tables_agree_with_each_other(day: Path) -> None:
    found = numbers(day)
    values = found["series"]["values"]
    assert sum(values["opens"]) == found["measured"]["uses"]
    assert sum(values["evicted_bytes"]) == found["totals"]["evicted_bytes"]
    assert values["hot_bytes"][-1] == found["tiers"]["hot"] <= HOT_BYTES
    assert max(values["hot_bytes"]) <= HOT_BYTES
    assert {cell[0] for cell in found["hottest"]} == {
        f"default/{name}" for name in ("logs", "reports", "models", "raw")
    }
    assert sum(cell[2] for cell in found["heat"]) == READS
    assert sum(found["returned"].values()) == found["totals"]["returns"] > 0


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")
def test_the_page_draws_in_a_browser_without_a_network(day: Path) -> None:
    page = day / "out.html"
    done = run("report", page, "--conf", day / "mount.conf", "--what-if", "hot_bytes=2MiB")
    assert done.exit_code == 0, done.stderr
    text = page.read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=", text)
    dom, said = opened(page, day)
    assert re.search(r'<body[^>]*data-drawn="7"', dom), said
    assert dom.count('class="main-svg"') >= 7
    assert "Bytes per tier" in dom
    assert "default/reports" in dom
    assert not re.findall(r"CONSOLE.*", said)


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")
def test_a_page_without_history_and_names_that_are_markup(tmp_path: Path) -> None:
    from aof2.engine.history.history import Returner, read_history
    from aof2.engine.history.sources import Log
    from aof2.fs.report.page import Waiting, page_of

    found = read_history(Log(None, None), None)
    evil = "</script><script>document.body.dataset.evil=1</script>"
    found.returners.append(Returner(path=evil, segment_id=1, returns=2))
    page = tmp_path / "empty.html"
    page.write_text(page_of(found, Waiting(1, 5, [evil], []), evil, 1_795_000_000_000))
    dom, said = opened(page, tmp_path)
    assert 'data-drawn="0"' in dom, said
    assert "data-evil" not in dom
    assert "no history yet" in dom


def opened(page: Path, folder: Path) -> tuple[str, str]:
    """The page as a browser has it once its scripts ran, and what it said; no name is found by it."""
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000",
        "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", f"--user-data-dir={folder / 'browser'}",
        "--window-size=1300,2600", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--what-if", "warm_bytes=1GiB"], "only hot_bytes can be replayed"),
        (["--what-if", "hot_bytes=much"], "a size such as 64MiB"),
        (["--what-if", "hot_bytes=0"], "1 byte at least"),
        (["--price", "put=cheap"], "NAME=DOLLARS"),
    ],
)
def test_what_cannot_be_asked(day: Path, options: list[str], said: str) -> None:
    result = run("report", "--json", "--conf", day / "mount.conf", *options)
    assert result.exit_code == 1
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_without_the_remote_the_history_is_what_this_disk_has(day: Path) -> None:
    alone, both = numbers(day, "--local"), numbers(day)
    assert alone["tiers"] == both["tiers"]
    assert alone["records"] < both["records"]
    assert not alone["whole"]
    assert parse_size("1MiB") == both["measured"]["limit_bytes"]
