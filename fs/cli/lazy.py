"""A group of commands listed by name and imported when they run: its help loads none of what they need."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import click

Commands = Mapping[str, tuple[str, str]]
"""A command's name → (its module, what the group's help says about it). In the module it is called that, `-` as `_`."""


class LazyGroup(click.Group):
    """A subclass names its commands, and the heading its help lists them under."""

    LISTED: Commands
    HEADING: str

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.LISTED)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.LISTED:
            return None
        module, _help = self.LISTED[cmd_name]
        command: click.Command = getattr(import_module(module), cmd_name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section(self.HEADING):
            formatter.write_dl([(name, self.LISTED[name][1]) for name in sorted(self.LISTED)])
