"""Requests that are signed here are signed as the SDK would."""

from __future__ import annotations

import datetime
from urllib.parse import quote, urlsplit

import pytest
from botocore import auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials

from aof2.engine.remote.s3_sign import signed_headers
from aof2.engine.remote.s3_url import SERVICE, Place

AT = datetime.datetime(2031, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)
NAMES = ("a", "p/blobs/0001/x~y", "with space/ü%+&=", "a//b/./c")
HEADERS = (
    {},
    {"x-amz-checksum-crc64nvme": "qeT1", "x-amz-meta-crc64": "00", "if-none-match": "*"},
    {"x-amz-meta-z": "two  words and\tmore", "x-amz-meta-a": "1", "if-match": '"etag"'},
)


def by_sdk(place: Place, url: str, headers: dict[str, str], body: bytes) -> dict[str, str]:
    request = AWSRequest("PUT", url, headers=dict(headers), data=body)
    auth.S3SigV4Auth(place.keys, SERVICE, place.region).add_auth(request)
    return {name.lower(): value for name, value in request.headers.items()}


@pytest.mark.parametrize("token", [None, "session+token=="])
@pytest.mark.parametrize("base", ["http://127.0.0.1:8333/bucket/", "https://bucket.s3.eu-west-1.amazonaws.com/"])
def test_signs_as_the_sdk_does(monkeypatch: pytest.MonkeyPatch, base: str, token: str | None) -> None:
    monkeypatch.setattr(auth, "get_current_datetime", lambda *_, **__: AT.replace(tzinfo=None))
    for secret, region in (("secret", "eu-west-1"), ("other/Secret+", "us-east-1")):
        place = Place(base, region, ReadOnlyCredentials("AKID", secret, token))
        for name in NAMES:
            url = urlsplit(base + quote(name, safe="/~"))
            for headers in HEADERS:
                for body in (b"", b"x" * 4096):
                    ours = signed_headers(place, "PUT", url.netloc, url.path, headers, body, AT.timestamp())
                    assert ours == by_sdk(place, url.geturl(), headers, body)


def test_each_day_has_a_key_of_its_own() -> None:
    place = Place("http://h/b/", "us-east-1", ReadOnlyCredentials("AKID", "secret", None))
    now_s = AT.timestamp()
    said = [signed_headers(place, "PUT", "h", "/b/k", {}, b"", at)["authorization"] for at in (now_s, now_s + 86_400)]
    assert said[0] != said[1]
    assert "/20310203/us-east-1/s3/aws4_request" in said[0]
    assert "/20310204/us-east-1/s3/aws4_request" in said[1]
