"""PUTs of small objects with nothing between them and the socket: what a waiter of one small file waits for, twice.

The SDK spends as long on a request as a server nearby does. Here one is signed by `s3_sign` and sent over a kept
connection of `s3_wire`, headers and body at once. The server is told the crc64, and the SHA-256 of the payload is
signed, so it stores these bytes or none.

Only 200 with an etag is taken. An answer that may be about this way of asking is None, and the SDK sends the request
again: the same bytes under the same name and condition, so nothing is done twice. Errors of the object or the server
are raised as the SDK would raise them.

Owner: any thread. A crash leaves a whole object or none.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, urlsplit

from aof2.engine.remote.resilience import Deadline
from aof2.engine.remote.s3_client import answered
from aof2.engine.remote.s3_sign import signed_headers
from aof2.engine.remote.s3_url import UrlSigner
from aof2.engine.remote.s3_wire import REFUSALS_MAX, Head, Wire

QUICK_BYTES_MAX: Final = 1 << 20
REFUSED_FOR_S: Final = 30.0


class QuickPut:
    """Puts to one bucket."""

    def __init__(self, signer: UrlSigner, wire: Wire) -> None:
        self._signer = signer
        self._wire = wire
        self._refusals = 0
        self._refused_s = 0.0

    def trust_again(self) -> None:
        """There are other keys: what was refused may be let in."""
        self._refusals = 0

    def _is_of_no_use(self) -> bool:
        """Refused again and again, and not long ago: the SDK is asked alone."""
        return self._refusals >= REFUSALS_MAX and time.monotonic() - self._refused_s < REFUSED_FOR_S

    def put(self, name: str, body: bytes, headers: Mapping[str, str], deadline: Deadline) -> str | None:
        """The etag of what is there now; None when the SDK should be asked. Names of headers are in lower case."""
        if len(body) > QUICK_BYTES_MAX or not self._wire.usable or self._is_of_no_use():
            return None
        place = self._signer.place()
        if place is None:
            return None
        parts = urlsplit(place.base + quote(name, safe="/~"))
        signed = signed_headers(place, "PUT", parts.netloc, parts.path, headers, body, time.time())
        try:
            answer = self._wire.put(parts, signed, body, deadline)
        except TimeoutError:
            deadline.check(f"put of {name}")
            raise
        if answer is None or _not_understood(*answer):
            self._refusals += 1
            self._refused_s = time.monotonic()
            return None
        head, code = answer
        if head.status == 200 and head.etag:
            self._refusals = 0
            return head.etag
        if head.status < 400:
            return None
        raise answered(head.status, code, "PutObject")


def _not_understood(head: Head, code: str) -> bool:
    """Whether the answer may be about this way of asking, or about keys, where the SDK's word counts."""
    if head.status == 400:
        return code in ("", "AuthorizationHeaderMalformed", "InvalidRequest", "InvalidArgument")
    return head.status in (401, 403, 411, 501, 505)
