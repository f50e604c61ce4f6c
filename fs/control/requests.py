"""What every request over the control socket has. The arguments of a verb are a struct of their own beside its handler;
anything else in a request is refused."""

from __future__ import annotations

import msgspec


class Args(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    verb: str


class Paths(Args, kw_only=True):
    paths: list[str]
