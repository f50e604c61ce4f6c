"""The [remote] section of mount.conf, as data. Checked when made; an error names key, value and what is allowed.

Owner: immutable. A crash leaves nothing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

_ALLOWED = "file:///absolute/path or s3://bucket or s3://bucket/prefix"
_WRITTEN = "file:///directory or s3://bucket/prefix (keys come from the AWS environment, not from the url)"
_S3_WRITTEN = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9!_.*'()/=+-]*)?")


class RemoteUrl(NamedTuple):
    """Where objects go. `prefix` is "" or ends with a slash; `path` is set for a directory only."""

    scheme: Literal["file", "s3"]
    bucket: str = ""
    prefix: str = ""
    path: Path = Path()


class RemoteSettings(msgspec.Struct, frozen=True):
    """Tier 2. `url` is `file:///dir` or `s3://bucket/prefix`; keys come from the usual AWS chain, never from here."""

    url: str = "file:///var/lib/aof2-remote"
    endpoint_url: str = ""
    region: str = ""
    timeout_s: float = 30.0
    retries: int = 5
    parallel: int = 16
    pack_after_s: float = 0.2  # what a sealed file waits for others, to go up with them

    def __post_init__(self) -> None:
        parse_url(self.url)
        if self.endpoint_url:
            _check_endpoint(self.endpoint_url)
        for key, value, low, high in (
            ("timeout", self.timeout_s, 0.1, 3600),
            ("retries", self.retries, 0, 100),
            ("parallel", self.parallel, 1, 256),
            ("pack_after", self.pack_after_s, 0, 60),
        ):
            if not low <= value <= high:
                raise ValueError(f"remote.{key} = {value}: allowed is {low} to {high}")

    @property
    def directory(self) -> Path | None:
        """The folder of a `file://` remote."""
        where = parse_url(self.url)
        return where.path if where.scheme == "file" else None


def url_as_written(value: Any) -> str:
    """remote.url as mount.conf has it: the path of a directory may still be relative. ValueError: what is allowed."""
    if isinstance(value, str):
        path = value.removeprefix("file://")
        if (path != value and path.strip("/") and unquote(path).isprintable()) or _S3_WRITTEN.fullmatch(value):
            return value
    raise ValueError(_WRITTEN)


def parse_url(url: str) -> RemoteUrl:
    """The parts of remote.url, or ValueError."""

    def bad(why: str, shown: str = url) -> ValueError:
        return ValueError(f'remote.url = "{shown}": {why}; allowed is {_ALLOWED}')

    try:
        parts = urlsplit(url)
        userinfo = "@" in parts.netloc
    except ValueError:
        raise bad("not a URL") from None
    if userinfo:
        raise bad("credentials do not belong in a URL", shown=f"{parts.scheme}://…")
    if parts.query or parts.fragment:
        raise bad("no query or fragment")
    if parts.scheme == "file":
        path = Path(unquote(parts.path))
        if parts.netloc not in ("", "localhost") or not path.is_absolute() or "\0" in str(path) or ".." in path.parts:
            raise bad("the path must be absolute")
        if path == Path("/"):
            raise bad("the root directory holds everything else")
        return RemoteUrl("file", path=path)
    if parts.scheme == "s3":
        if not parts.netloc or not all(c.isascii() and (c.isalnum() or c in ".-_") for c in parts.netloc):
            raise bad("a bucket's name has letters, digits, dots and hyphens")
        prefix = parts.path.strip("/")
        if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
            raise bad("the prefix has empty or dotted parts")
        return RemoteUrl("s3", bucket=parts.netloc, prefix=f"{prefix}/" if prefix else "")
    raise bad("unknown scheme")


def _check_endpoint(url: str) -> None:
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        fine = False
    if not fine or "@" in url or parts.query or parts.fragment:
        shown = url if "@" not in url else "…"
        raise ValueError(f'remote.endpoint_url = "{shown}": allowed is http://host:port or https://host, or ""')
