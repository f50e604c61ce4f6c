"""A tree of source code: cloned, checked out back and forth, walked, removed, unpacked.

The repository is a given one or made up; either way each contestant clones a bare, packed copy of it on the local disk.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from aof2.fs.bench.contestants import Contestant
from aof2.fs.bench.process import Processes, StepError
from aof2.fs.bench.race import Race, drop_metadata
from aof2.fs.bench.verdict import Outcome

FOLDERS: Final = 50
LINES_MAX: Final = 200
GIT_S: Final = 300.0
# Nothing of this machine's own set-up; and a repository may be another user's.
GIT_ENVIRON: Final = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "GIT_AUTHOR_NAME": "bench",
    "GIT_AUTHOR_EMAIL": "bench@localhost",
    "GIT_COMMITTER_NAME": "bench",
    "GIT_COMMITTER_EMAIL": "bench@localhost",
}
Line = Sequence[str | Path]


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    repository: Path
    archive: Path
    new: str
    old: str
    files: int  # of `new`
    changed: int  # between the two


def prepare(folder: Path, processes: Processes, given: Path | None, files: int) -> Tree:
    """A copy of the repository with what the rows need of it. StepError where it has one commit only."""
    folder.mkdir()
    source = given if given is not None else make_up(folder / "made", processes, files)
    repository, archive = folder / "tree.git", folder / "tree.tar"

    def git(*arguments: str | Path) -> list[str]:
        line = ["git", "-C", repository, *arguments]
        return processes.run(line, deadline_s=GIT_S, env=GIT_ENVIRON).splitlines()

    processes.run(
        ["git", "clone", "-q", "--bare", "--no-hardlinks", source, repository], deadline_s=GIT_S, env=GIT_ENVIRON
    )
    git("repack", "-adq")
    commits = git("rev-list", "--first-parent", "HEAD")
    if len(commits) < 2:
        raise StepError(f"{source}: one commit only; a tree to check out back and forth has two")
    new, old = commits[0], commits[len(commits) // 2]
    git("archive", "-o", archive, new)
    count = len(git("ls-tree", "-r", "--name-only", new))
    changed = len(git("diff", "--name-only", "--no-renames", old, new))
    return Tree(repository=repository, archive=archive, new=new, old=old, files=count, changed=changed)


def make_up(folder: Path, processes: Processes, files: int) -> Path:
    """A repository of two commits; the second changes a third of the files, removes some and adds as many."""
    rng = random.Random(files)  # noqa: S311

    def write(numbers: Iterable[int]) -> None:
        for n in numbers:
            path = folder / f"part{n % FOLDERS:02d}" / f"module{n:05d}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = (f"value_{rng.randrange(1000)} = {rng.random()}\n" for _ in range(rng.randint(5, LINES_MAX)))
            path.write_text("".join(lines))

    def commit() -> None:
        for line in (["add", "-A"], ["commit", "-qm", "a step"]):
            processes.run(["git", "-C", folder, *line], deadline_s=GIT_S, env=GIT_ENVIRON)

    processes.run(["git", "init", "-q", folder], deadline_s=GIT_S, env=GIT_ENVIRON)
    write(range(files))
    commit()
    gone = range(0, files, 9)
    for n in gone:
        (folder / f"part{n % FOLDERS:02d}" / f"module{n:05d}.py").unlink()
    write(range(1, files, 3))
    write(range(files, files + len(gone)))
    commit()
    return folder


class Chore(msgspec.Struct, frozen=True, kw_only=True):
    """What is done with a tree in a folder: the lines that are timed, and how many files that is."""

    what: str
    lines: Callable[[Tree, Path], list[Line]]
    files: Callable[[Tree], int] = lambda tree: tree.files
    dropped: bool = False  # the kernel's names go first: the filesystem answers


def _clone(tree: Tree, folder: Path) -> list[Line]:
    return [["git", "clone", "-q", "--no-hardlinks", tree.repository, folder]]


def _check_out(tree: Tree, folder: Path) -> list[Line]:
    return [["git", "-C", folder, "checkout", "-q", commit] for commit in (tree.old, tree.new)]


CHORES: Final = (
    Chore(what="git clone", lines=_clone),
    Chore(what="git checkout back and forth", lines=_check_out, files=lambda tree: 2 * tree.changed),
    Chore(what="find", lines=lambda tree, folder: [["find", folder]], dropped=True),
    Chore(what="du", lines=lambda tree, folder: [["du", "-s", folder]], dropped=True),
    Chore(what="rm -rf", lines=lambda tree, folder: [["rm", "-rf", folder]]),
    Chore(
        what="tar x",
        lines=lambda tree, folder: [["mkdir", folder], ["tar", "xf", tree.archive, "-C", folder]],
    ),
)


def do(race: Race, chore: Chore, tree: Tree, who: Sequence[Contestant]) -> Outcome:
    """Files a second; what the daemons took counts until names are where they stay."""

    def attempt(c: Contestant, n: int) -> float:
        if chore.dropped:
            drop_metadata()
        with race.metering(c) as meter:
            seconds = run(race, chore.lines(tree, c.directory / f"tree{n}"))["seconds"]
            c.settle()
            meter.units = chore.files(tree)
        return chore.files(tree) / seconds

    return race.turns(attempt, who)


def run(race: Race, lines: Sequence[Line]) -> dict[str, float]:
    plain = [[str(word) for word in line] for line in lines]
    return race.work("command", json.dumps(plain), env=dict(GIT_ENVIRON))
