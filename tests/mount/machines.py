"""Machines that share a remote, in any order: which may write, and what must never be lost."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from aof2.fs.mountpoint import NO_DAEMON
from tests.mount.world import World, is_mounted, kill

CONF = '[cache]\nhot_bytes = "256MiB"\nwarm_bytes = "0"\nmin_free = "1MiB"\n[tenants.default]\nkind = "files"\n'
NAMES = ("a", "b")


class Machine:
    """A state_dir and a mountpoint. `claim` is the last claim that it made or was restored under."""

    def __init__(self, root: Path, name: str) -> None:
        remote = f'[remote]\nurl = "file://{root / "remote"}"\ntimeout = "5s"\n'
        self.name = name
        self.world = World(root / name, remote=remote, conf=CONF)
        self.claim = -1
        self.seen = -1  # durable writes that it had when it was restored, or made itself
        self.killed = False  # since its last mount: what is left of that answers that it is dead

    @property
    def mounted(self) -> bool:
        return is_mounted(self.world.mnt)


class Machines:
    """Random steps, and the model that says what each must come to."""

    def __init__(self, root: Path, seed: int, say: Callable[[str], object]) -> None:
        (root / "remote").mkdir(parents=True)
        self.root = root
        self.rng = random.Random(seed)
        self.say = say
        self.machines = [Machine(root, name) for name in NAMES]
        self.claim = 0
        self.durable: dict[str, bytes] = {}
        self.holder: Machine | None = None
        self.refused = self.taken = 0

    def run(self, rounds: int) -> None:
        self._mount(self.machines[0], first=True)
        for number in range(rounds):
            machine = self.rng.choice(self.machines)
            steps = (self._write, self._mount, self._kill, self._umount, self._restore)
            step = self.rng.choices(steps, (4, 4, 1, 1, 0 if machine is self.holder else 2))[0]
            self.say(f"{number}: {step.__name__.strip('_')} {machine.name}")
            step(machine)
        self._check_holder()

    def close(self) -> None:
        for machine in self.machines:
            machine.world.close()

    # -- steps -------------------------------------------------------------------------------------------------

    def _write(self, machine: Machine) -> None:
        """What `wait` says is durable stays so; a machine that lost the volume cannot say it."""
        if not machine.mounted:
            return
        name, data = f"{machine.name}{len(self.durable)}", self.rng.randbytes(1000)
        try:
            (machine.world.files / name).write_bytes(data)
        except OSError as e:
            is_dead = machine.killed and e.errno in NO_DAEMON
            assert is_dead or machine is not self.holder, f"the holder is refused: {e}\n{machine.world.log_tail()}"
            return
        done = machine.world.run("wait", machine.world.files / name)
        if machine is self.holder:
            assert done.code == 0, f"{done.err}\n{machine.world.log_tail()}"
            self.durable[name] = data
            machine.seen = len(self.durable)
        else:
            assert done.code != 0, "a machine that lost the volume called a file durable"

    def _kill(self, machine: Machine) -> None:
        if machine.mounted and not machine.killed:
            kill(machine.world.daemon_pid())
            machine.killed = True

    def _umount(self, machine: Machine) -> None:
        if machine.mounted:
            done = machine.world.run("umount")
            assert machine is not self.holder or machine.killed or done.code == 0, done.err
            if machine.mounted:
                machine.world.run("umount", "--no-wait")

    def _restore(self, machine: Machine) -> None:
        """From the remote, into a fresh state_dir: what it had is thrown away."""
        if machine.mounted:
            return
        shutil.rmtree(machine.world.state, ignore_errors=True)
        machine.world.run("restore", "--from", f"file://{self.root / 'remote'}")
        assert machine.world.state.exists()
        machine.claim, machine.seen = self.claim, len(self.durable)
        if machine is self.holder:
            self.holder = None  # a new machine by the same name

    def _mount(self, machine: Machine, *, first: bool = False) -> None:
        if machine.mounted and machine.world.run("status").code == 0:
            return
        current = first or (machine.claim == self.claim and machine.seen == len(self.durable))
        if not first and not machine.world.state.exists():
            return
        done = machine.world.run("mount")
        if not current:
            assert done.code == 1, f"a stale machine mounted: {done.out}{done.err}"
            assert "another machine" in done.err, done.err
            self.refused += 1
            return
        if done.code == 1 and machine is not self.holder and "another machine has written" in done.err:
            self.refused += 1  # bookkeeping of the holder came after the restore
            return
        assert done.code == 0, f"{done.err}\n{machine.world.log_tail()}"
        machine.killed = False
        self.taken += machine is not self.holder
        self.claim += 1
        machine.claim, machine.seen = self.claim, len(self.durable)
        self.holder = machine
        self._check_holder()

    def _check_holder(self) -> None:
        """Nothing that was acknowledged is missing where the volume lives."""
        if self.holder is None or not self.holder.mounted:
            return
        try:
            os.listdir(self.holder.world.files)
        except OSError:
            return  # killed: looked at when it is back
        for name, data in self.durable.items():
            assert (self.holder.world.files / name).read_bytes() == data, name
