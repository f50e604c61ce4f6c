"""open_remote: the store that remote.url names. boto3 is imported for s3:// only.

Owner: called once a mount, after the fork. A crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from aof2.engine.env import Env
from aof2.engine.remote.store import RemoteStore
from aof2.engine.settings.remote import RemoteSettings, parse_url


def open_remote(env: Env, settings: RemoteSettings, *, sleep_s: Callable[[float], object] | None = None) -> RemoteStore:
    """Opens without asking the remote anything: the first call tells whether it is there."""
    url = parse_url(settings.url)
    if url.scheme == "file":
        from aof2.engine.remote.directory import DirectoryStore

        return DirectoryStore(env, settings, sleep_s=sleep_s)
    from aof2.engine.remote.s3 import S3Store

    return S3Store(env, settings, sleep_s=sleep_s)
