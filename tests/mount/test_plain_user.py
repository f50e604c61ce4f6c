"""A user who is not root: what README says works for him, and where something is missing he is told what to run.

The tests of the mount run a second time here, as that user, in processes of their own: tests/posix as far as it does
not take root, with the durability tests, and the outage tests; LEFT_OUT says what of them is not. Where tests run as a
user anyway, these are skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import plain_user
from tests.support.mount import AOF2

PROJECT = plain_user.PROJECT
RUN_MAX_S = 480
LEFT_OUT = (
    "tests/posix/test_directories.py::test_ten_thousand_names_while_they_change",  # long, and no different for a user
    "tests/mount/test_outage.py::test_the_remote_blinks_under_load",  # likewise
    "tests/posix/test_kept_pages.py",  # likewise
    "tests/posix/test_births.py",  # of passthrough
    "tests/posix/test_walks.py",  # drops the kernel's caches
    "tests/posix/test_semantics_page.py",  # of the page, not of the mount
)
SUITES = {"posix": ("tests/posix",), "outage": ("tests/mount/test_outage.py",)}
PASSED_MIN = {"posix": 100, "outage": 2}

pytestmark = pytest.mark.timeout(RUN_MAX_S + 60)


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A folder of the user's, which he can reach."""
    if reason := plain_user.why_not():
        pytest.skip(reason)
    path = Path(tempfile.mkdtemp(prefix="aof2-home-"))
    path.chmod(0o755)
    yield plain_user.give(path)
    shutil.rmtree(path)


class User:
    """Commands run as the user, in his folder."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.conf = home / "mount.conf"
        self.mnt = home / "mnt"

    def run(self, *args: object, **environ: str) -> subprocess.CompletedProcess[str]:
        env = plain_user.environment(self.home) | {"AOF2_CONF": str(self.conf)} | environ
        return subprocess.run(
            plain_user.command(*args), env=env, capture_output=True, text=True, timeout=120, check=False
        )

    def line(self, *args: object, **environ: str) -> str:
        """The one line of a run that must fail."""
        done = self.run(*args, **environ)
        assert done.returncode == 1, (done.returncode, done.stdout, done.stderr)
        assert len(done.stderr.splitlines()) == 1, done.stderr
        return done.stderr.strip()


def write_conf(path: Path, root: Path) -> None:
    path.write_text(
        f'[volume]\nmountpoint = "{root}/mnt"\nstate_dir = "{root}/state"\n[remote]\nurl = "file://{root}/remote"\n'
        '[cache]\nhot_bytes = "64MiB"\nwarm_bytes = "0"\n[metrics]\nlisten = ""\n[tenants.default]\nkind = "files"\n'
    )


@pytest.fixture
def user(home: Path, tmp_path: Path) -> User:
    one = User(plain_user.give(home / tmp_path.name))
    write_conf(one.conf, one.home)
    return one


# -- the other tests, as that user ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def suites(home: Path) -> Iterator[dict[str, tuple[subprocess.Popen[str], Path]]]:
    """Both at once, beside the tests below: those of the outages mostly wait."""
    started = {}
    for name, paths in SUITES.items():
        folder = plain_user.give(home / name)
        command = [sys.executable, "-B", "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--rootdir", PROJECT]
        command += ["-c", PROJECT / "pyproject.toml", f"--basetemp={folder / 'tmp'}"]
        command += [f"--deselect={one}" for one in LEFT_OUT]
        env = plain_user.environment(folder) | {
            "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
            "PYTHONPATH": str(PROJECT),
        }
        report = home / f"{name}.out"
        with open(report, "w") as out:
            args = plain_user.command(*command, *(PROJECT / path for path in paths))
            started[name] = subprocess.Popen(args, env=env, stdout=out, stderr=out, text=True), report
    yield started
    for process, _ in started.values():
        if process.poll() is None:
            process.terminate()
            process.wait(60)


# -- README, line by line ------------------------------------------------------------------------------------------

README = r"""
set -eu
cd "$HOME"
$AOF2 mount
test "$(stat -c %u:%g mnt/default)" = "$(id -u):$(id -g)"
mkdir data && echo one >data/1 && head -c 3000000 /dev/urandom >data/2
cp -r data mnt/default/
test "$(stat -c %u:%g mnt/default/data/2)" = "$(id -u):$(id -g)"
$AOF2 status | grep -q '^passthrough.off'
$AOF2 status mnt/default/data/2 | grep -q '^size.3000000'
$AOF2 wait mnt/default/data
$AOF2 status mnt/default/data/2 | grep -q '^durable.yes'
$AOF2 evict mnt/default/data
cmp data/2 mnt/default/data/2
$AOF2 evict mnt/default/data && $AOF2 warm mnt/default/data && $AOF2 pin mnt/default/data/1
$AOF2 why mnt/default/data/2 | grep -q LocalEvicted
rm mnt/default/data/2
$AOF2 undelete mnt/default/data/2
cmp data/2 mnt/default/data/2
$AOF2 verify --remote
$AOF2 manifest inspect default --json | grep -q LocalEvicted
$AOF2 top </dev/null | grep -q mnt
$AOF2 checkpoint --wait
test "$(stat -c %a:%u mnt/.aof2)" = "500:$(id -u)"
grep -q default mnt/.aof2/status.json
test "$(stat -c %a state/control.sock)" = 600
echo changed >>data/1 && cp data/1 mnt/default/data/1
$AOF2 umount
$AOF2 mount
cmp data/1 mnt/default/data/1
fusermount3 -uz mnt                      # as a user takes away any mount of his
until $AOF2 status | grep -q 'daemon.not running'; do sleep 0.1; done
$AOF2 mount && $AOF2 umount
$AOF2 restore --from "file://$HOME/remote" --conf other/mount.conf
$AOF2 mount --conf other/mount.conf
diff -r data other/mnt/default/data
echo new >other/mnt/default/new
$AOF2 umount --conf other/mount.conf
"""


def test_what_readme_says(user: User) -> None:
    other = plain_user.give(user.home / "other")
    write_conf(other / "mount.conf", other)
    conf = other / "mount.conf"
    conf.write_text(conf.read_text().replace(f"file://{other}/remote", f"file://{user.home}/remote"))
    done = user.run("bash", "-c", README, AOF2=str(AOF2))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_root_made_it_and_the_user_mounts_it(user: User) -> None:
    """A volume is its state_dir's owner's, whoever made it: the tenants' directories go to him."""
    env = os.environ | {"AOF2_CONF": str(user.conf)}
    for verb in ("mount", "umount"):
        subprocess.run([AOF2, verb], env=env, check=True, capture_output=True, timeout=120)
    for path in user.home.rglob("*"):
        os.chown(path, plain_user.UID, plain_user.UID, follow_symlinks=False)
    script = f'set -e; {AOF2} mount; echo mine >"$HOME/mnt/default/f"; {AOF2} umount'
    done = user.run("bash", "-c", script)
    assert done.returncode == 0, done.stderr
    # Root mounts it again: it stays the user's, and so does what a new tenant gets.
    user.conf.write_text(user.conf.read_text() + '[tenants.second]\nkind = "files"\n')
    subprocess.run([AOF2, "mount"], env=env, check=True, capture_output=True, timeout=120)
    try:
        owners = {name: (user.mnt / name).stat().st_uid for name in ("default", "second", "default/f")}
    finally:
        subprocess.run([AOF2, "umount"], env=env, check=True, capture_output=True, timeout=120)
    assert owners == dict.fromkeys(owners, plain_user.UID)


# -- what is missing -----------------------------------------------------------------------------------------------


def test_the_device_may_not_be_opened(user: User) -> None:
    said = user.line(AOF2, "mount", AOF2_TEST_DEVICE_MODE="600")
    assert said == "aof2: /dev/fuse: this user may not open it; run: sudo chmod 666 /dev/fuse"
    script = user.line(PROJECT / "scripts" / "aof2", "mount", AOF2_TEST_DEVICE_MODE="600")
    assert script == said


def test_no_fusermount(user: User) -> None:
    said = user.line("env", "PATH=/nowhere", AOF2, "mount")
    assert said.endswith("run: sudo apt-get install -y fuse3")


def test_fusermount_without_its_bit(user: User) -> None:
    found = shutil.which("fusermount3")
    assert found
    copied = plain_user.give(user.home / "bin") / "fusermount3"
    shutil.copyfile(found, copied)
    copied.chmod(0o755)
    assert not copied.stat().st_mode & stat.S_ISUID
    said = user.line(AOF2, "mount", PATH=f"{copied.parent}:/usr/bin:/bin")
    assert said.endswith(f"run: sudo chown root {copied} && sudo chmod 4755 {copied}")


def test_options_that_take_root(user: User) -> None:
    assert user.line(AOF2, "mount", "-o", "suid").startswith("aof2: -o suid: only root")
    if "\nuser_allow_other" not in Path("/etc/fuse.conf").read_text():
        said = user.line(AOF2, "mount", "-o", "allow_other")
        assert said.endswith("run: echo user_allow_other | sudo tee -a /etc/fuse.conf")


def test_folders_that_are_not_his(user: User, home: Path) -> None:
    roots = home / "roots"
    roots.mkdir(mode=0o755, exist_ok=True)
    write_conf(user.conf, roots)
    folders = f"{roots}/mnt {roots}/state {roots}/remote"
    assert user.line(AOF2, "mount").endswith(f"run: sudo install -d -o nobody -g nogroup {folders}")
    (roots / "state").mkdir(mode=0o700)
    said = user.line(AOF2, "mount")
    assert said == f"aof2: {roots}/state: it is root's; run as root, or name a folder of your own in mount.conf"


def test_helpers_are_roots(user: User) -> None:
    said = user.line(AOF2, "install-helpers")
    assert said.endswith(f"only root may write there; run: sudo {AOF2} install-helpers")


# -- what became of them -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(SUITES))
def test_the_mounts_tests(suites: dict[str, tuple[subprocess.Popen[str], Path]], name: str) -> None:
    process, report = suites[name]
    code = process.wait(RUN_MAX_S)
    said = report.read_text()
    assert code == 0, said[-8000:]
    assert not any(Path(one).stem in said for one in LEFT_OUT if "::" not in one), "what is left out ran"
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None and int(passed[1]) >= PASSED_MIN[name], said[-2000:]
