"""AWS Signature Version 4 of one request: the headers that prove who sends it, and the SHA-256 of what it carries.

The SDK's signer spends a quarter of a millisecond on a request, as much as everything else that is done for a small
PUT here; this one a tenth of that. It knows requests without a query and without repeated headers, which is all that
`s3_put` sends, and says the same as the SDK's, byte by byte (`tests/remote/test_sign.py`).

Owner: any thread; the key of the day is kept, and the first request of the next day derives another. A crash leaves
nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from aof2.engine.remote.s3_url import SERVICE, Place

ALGORITHM: Final = "AWS4-HMAC-SHA256"
TERMINATOR: Final = "aws4_request"
UNSIGNED: Final = "UNSIGNED-PAYLOAD"


def signed_headers(
    place: Place, method: str, host: str, path: str, headers: Mapping[str, str], body: bytes | str, at_s: float
) -> dict[str, str]:
    """`headers` (names in lower case) and those that sign them. `path` is quoted as it is sent; `at_s` since 1970. Of
    a body that is not in one piece, its SHA-256 in hex, or UNSIGNED."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at_s))
    day, payload = stamp[:8], body if isinstance(body, str) else hashlib.sha256(body).hexdigest()
    out = {**headers, "x-amz-content-sha256": payload, "x-amz-date": stamp}
    if place.keys.token:
        out["x-amz-security-token"] = place.keys.token
    signing = {**out, "host": host}
    names = sorted(signing)
    lines = "".join(f"{name}:{' '.join(signing[name].split())}\n" for name in names)
    which = ";".join(names)
    canonical = f"{method}\n{path}\n\n{lines}\n{which}\n{payload}"
    scope = f"{day}/{place.region}/{SERVICE}/{TERMINATOR}"
    to_sign = f"{ALGORITHM}\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = _key_of_day(place.keys.secret_key, day, place.region)
    signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
    out["authorization"] = (
        f"{ALGORITHM} Credential={place.keys.access_key}/{scope}, SignedHeaders={which}, Signature={signature}"
    )
    return out


@lru_cache(maxsize=4)
def _key_of_day(secret_key: str, day: str, region: str) -> bytes:
    key = f"AWS4{secret_key}".encode()
    for part in (day, region, SERVICE, TERMINATOR):
        key = hmac.digest(key, part.encode(), "sha256")
    return key
