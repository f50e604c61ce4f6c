"""Signed URLs of objects, made once and used for a while.

The SDK makes the first one: it knows the endpoint, how the bucket is addressed, the region and the session token, and
takes a millisecond for it. Others differ from that one in the key alone, so they are signed by its signer and nothing
else.

Invariant: a URL is a credential. It is never in an error or a log.

Owner: any thread; a lock guards the few it keeps. A crash leaves nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qs, quote, urlsplit

from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest

from aof2.engine.env import Env
from aof2.engine.remote.s3_client import Sdk

URL_VALID_S: Final = 3600
URL_USED_S: Final = 900.0
URLS_MAX: Final = 1024
SERVICE: Final = "s3"


class Place(NamedTuple):
    """What all requests of a bucket have in common: where its objects are, and the keys to sign with."""

    base: str
    region: str
    keys: Any


class UrlSigner:
    """URLs to GET the objects of one bucket."""

    def __init__(self, env: Env, sdk: Sdk, bucket: str) -> None:
        self._env = env
        self._sdk = sdk
        self._bucket = bucket
        self._lock = threading.Lock()
        self._urls: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self._pattern: Place | None = None

    @property
    def is_quick(self) -> bool:
        """Whether `url` is a matter of computing alone: no new keys have to be fetched for it."""
        keys = self._sdk.credentials
        refresh_needed = getattr(keys, "refresh_needed", None)
        return self._pattern is not None and keys is not None and not (refresh_needed is not None and refresh_needed())

    def url(self, name: str) -> str:
        now_s = self._env.monotonic_s()
        with self._lock:
            made_s, url = self._urls.get(name, (0.0, ""))
        if url and now_s - made_s < URL_USED_S:
            return url
        pattern = self._pattern
        url = self._by_sdk(name) if pattern is None else self._signed(pattern, name)
        with self._lock:
            self._urls[name] = (now_s, url)
            self._urls.move_to_end(name)
            while len(self._urls) > URLS_MAX:
                self._urls.popitem(last=False)
        return url

    def place(self) -> Place | None:
        """What a request is signed with; None where URLs are not what is expected of S3."""
        if self._pattern is None:
            self._by_sdk("volume.json")  # any name tells
        return self._frozen(self._pattern) if self._pattern is not None else None

    def _frozen(self, pattern: Place) -> Place:
        return pattern._replace(keys=self._sdk.credentials.get_frozen_credentials())

    def forget(self, name: str) -> None:
        """It was refused: keys or region may have changed."""
        with self._lock:
            self._urls.pop(name, None)
            self._pattern = None

    def renew(self, sdk: Sdk) -> None:
        """There are other keys: what was signed with the old ones is forgotten."""
        with self._lock:
            self._sdk = sdk
            self._urls.clear()
            self._pattern = None

    def _by_sdk(self, name: str) -> str:
        params = {"Bucket": self._bucket, "Key": name}
        url = str(self._sdk.client.generate_presigned_url("get_object", Params=params, ExpiresIn=URL_VALID_S))
        self._pattern = self._pattern_of(url, name)
        return url

    def _pattern_of(self, url: str, name: str) -> Place | None:
        """None where a URL is not what is expected of S3: then the SDK makes each."""
        parts = urlsplit(url)
        scope = parse_qs(parts.query).get("X-Amz-Credential", [""])[0].split("/")
        path = quote(name, safe="/~")
        if self._sdk.credentials is None or len(scope) != 5 or scope[3] != SERVICE or not parts.path.endswith(path):
            return None
        return Place(f"{parts.scheme}://{parts.netloc}{parts.path.removesuffix(path)}", scope[2], None)

    def _signed(self, pattern: Place, name: str) -> str:
        request = AWSRequest("GET", pattern.base + quote(name, safe="/~"))
        place = self._frozen(pattern)
        S3SigV4QueryAuth(place.keys, SERVICE, place.region, expires=URL_VALID_S).add_auth(request)
        return str(request.url)
