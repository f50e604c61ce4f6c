"""The manifest log's view of the remote: RemoteStore behind a Fence, as engine.manifest.upload asks for it.

Owner: any thread. A crash leaves whole objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aof2.engine.remote.fence import Fence


class FencedManifestRemote:
    """A ManifestRemote that stops for good when another writer owns the volume."""

    def __init__(self, fence: Fence) -> None:
        self._fence = fence

    def put(self, key: str, data: bytes, metadata: Mapping[str, str]) -> str:
        return self._fence.put_manifest(key, data, metadata)

    def compose(self, key: str, sources: Sequence[str]) -> str:
        return self._fence.compose_manifest(key, sources)

    def delete(self, key: str) -> None:
        self._fence.delete([key])
