"""PUTs with nothing between them and the socket: what a waiter of one small file waits for, twice, and chunks of large
files on their way to a server nearby.

The SDK spends as long on a request as a server nearby does, and on a pack longer than all that is done for its members.
Here a request is signed by `s3_sign` and sent over a kept connection of `s3_wire`, a small one headers and body
together.

The server is told the crc64, which is signed, so it stores these bytes or none. The SHA-256 of a large payload, which
takes longer than everything else on its way, is signed where nothing else speaks for it: not over TLS, and not on this
machine or in a private network to a server that has shown, with the crc64 of an earlier put in its answer, that it
reckons that itself. A put without it whose answer does not show that again is sent once more, signed; a conditional put
could not be, and is always signed.

A chunk of 64 MiB takes 0.02 s of processor this way, a tenth of what its parts take by the SDK; with the server on the
same machine that is a third of the time. Over a long line several connections carry more than one: `is_near` says
whether small ones were answered so soon that this does not matter.

Only 200 with an etag is taken. An answer that may be about this way of asking is None, and the SDK sends the request
again: the same bytes under the same name and condition, so nothing is done twice. Errors of the object or the server
are raised as the SDK would raise them.

Owner: any thread. A crash leaves a whole object or none.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Mapping
from typing import Final
from urllib.parse import quote, urlsplit

from aof2.engine.remote.resilience import Deadline
from aof2.engine.remote.s3_client import answered
from aof2.engine.remote.s3_sign import UNSIGNED, signed_headers
from aof2.engine.remote.s3_url import UrlSigner
from aof2.engine.remote.s3_wire import REFUSALS_MAX, Head, Stream, Wire

QUICK_BYTES_MAX: Final = 1 << 20
REFUSED_FOR_S: Final = 30.0
NEAR_S: Final = 0.03
CRC64_HEADER: Final = "x-amz-checksum-crc64nvme"
FORGET: Final = 1.05  # what the quickest answer so far is multiplied with at each further one


class QuickPut:
    """Puts to one bucket."""

    def __init__(self, signer: UrlSigner, wire: Wire) -> None:
        self._signer = signer
        self._wire = wire
        self._refusals = 0
        self._refused_s = 0.0
        self._quickest_s = float("inf")
        self._reckons = False  # the server has told a crc64 of its own

    @property
    def is_near(self) -> bool:
        """Whether the server answers so soon that one connection carries what it takes."""
        return self._quickest_s < NEAR_S

    def trust_again(self) -> None:
        """There are other keys: what was refused may be let in."""
        self._refusals = 0

    def _is_of_no_use(self) -> bool:
        """Refused again and again, and not long ago: the SDK is asked alone."""
        return self._refusals >= REFUSALS_MAX and time.monotonic() - self._refused_s < REFUSED_FOR_S

    def put(self, name: str, body: bytes, headers: Mapping[str, str], deadline: Deadline) -> str | None:
        """The etag of what is there now; None when the SDK should be asked. Names of headers are in lower case."""
        if len(body) > QUICK_BYTES_MAX:
            return None
        began_s = time.monotonic()
        etag = self._put(name, body, body, headers, deadline)
        if etag is not None:
            self._quickest_s = min(self._quickest_s * FORGET, time.monotonic() - began_s)
        return etag

    def stream(
        self, name: str, body: Stream, sha256: Callable[[], str], headers: Mapping[str, str], deadline: Deadline
    ) -> str | None:
        """The same of a large object. `sha256` is of the body, in hex, and asked where it is signed."""
        place = self._signer.place()
        if place is None or not self._wire.usable or self._is_of_no_use():
            return None
        is_told = self._reckons and _is_private(place.base) and "if-none-match" not in headers
        is_safe = place.base.startswith("https:") or is_told
        return self._put(name, body, UNSIGNED if is_safe else sha256(), headers, deadline)

    def _put(
        self, name: str, body: bytes | Stream, payload: bytes | str, headers: Mapping[str, str], deadline: Deadline
    ) -> str | None:
        if not self._wire.usable or self._is_of_no_use():
            return None
        place = self._signer.place()
        if place is None:
            return None
        parts = urlsplit(place.base + quote(name, safe="/~"))
        signed = signed_headers(place, "PUT", parts.netloc, parts.path, headers, payload, time.time())
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
            self._reckons = bool(head.crc64) and head.crc64 == headers.get(CRC64_HEADER)
            is_proven = self._reckons or payload != UNSIGNED or parts.scheme == "https"
            return head.etag if is_proven else None
        if head.status < 400:
            return None
        raise answered(head.status, code, "PutObject")


def _is_private(url: str) -> bool:
    """Whether it is of this machine or of a private network, by its address; a name could lead anywhere."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_private


def _not_understood(head: Head, code: str) -> bool:
    """Whether the answer may be about this way of asking, or about keys, where the SDK's word counts."""
    if head.status == 400:
        return code in ("", "AuthorizationHeaderMalformed", "InvalidRequest", "InvalidArgument")
    return head.status in (401, 403, 411, 501, 505)
