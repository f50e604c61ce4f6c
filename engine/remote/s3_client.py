"""The boto3 client of a store, and the one function that turns what it raises into errors.py.

The SDK's own retries are off (resilience.py has them), its own checksums too (every body carries our crc64, and with an
endpoint of unknown make the payload is signed as well: any S3 must verify that SHA-256).

Owner: the client is shared by all threads of a store. A crash leaves nothing.
"""

from __future__ import annotations

import http.client
from typing import Any, Final, NamedTuple

import boto3
import botocore.session
import urllib3.exceptions
from botocore import exceptions as sdk
from botocore.config import Config

from aof2.engine.errors import Aof2Error
from aof2.engine.remote.errors import (
    RemoteAuthError,
    RemoteMissingError,
    RemoteRefusedError,
    RemoteThrottledError,
    RemoteUnavailableError,
)
from aof2.engine.settings.remote import RemoteSettings

CONNECT_TIMEOUT_S_MAX: Final = 5.0
READ_TIMEOUT_S_MIN: Final = 1.0
SPARE_CONNECTIONS: Final = 4

SDK_ERRORS: Final = (
    sdk.BotoCoreError,
    sdk.ClientError,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    OSError,
)

_THROTTLED: Final = frozenset(
    [
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "RequestLimitExceeded",
        "TooManyRequests",
        "TooManyRequestsException",
        "BandwidthLimitExceeded",
        "RequestThrottled",
        "ReduceYourRequestRate",
        "ConditionalRequestConflict",
        "OperationAborted",
    ]
)
_AUTH: Final = frozenset(
    [
        "AccessDenied",
        "AccountProblem",
        "AllAccessDisabled",
        "AuthorizationHeaderMalformed",
        "ExpiredToken",
        "Forbidden",
        "IllegalLocationConstraintException",
        "InvalidAccessKeyId",
        "InvalidSecurity",
        "InvalidToken",
        "NotSignedUp",
        "PermanentRedirect",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
        "UnauthorizedAccess",
    ]
)
_DAMAGED_ON_THE_WAY: Final = frozenset(["BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "IncompleteBody"])
_NO_CREDENTIALS: Final = (
    sdk.NoCredentialsError,
    sdk.PartialCredentialsError,
    sdk.CredentialRetrievalError,
    sdk.TokenRetrievalError,
    sdk.SSOError,
    sdk.ProfileNotFound,
    sdk.NoAuthTokenError,
)


class PreconditionFailedError(Aof2Error):
    """412: the object is there, or is not the one expected. Never leaves s3.py."""


class RangeError(Aof2Error):
    """416: the object ends before the range starts. Never leaves s3.py."""


class UploadGoneError(RemoteUnavailableError):
    """The multipart upload is over: aborted by another process, or completed, perhaps by us with the answer lost."""


def connect_timeout_s(settings: RemoteSettings) -> float:
    return min(CONNECT_TIMEOUT_S_MAX, settings.timeout_s)


def read_timeout_s(settings: RemoteSettings) -> float:
    """A connection that has gone silent is given up while there is time for another."""
    return max(READ_TIMEOUT_S_MIN, settings.timeout_s / 3)


class Sdk(NamedTuple):
    """The client, the keys it signs with (None: it does not), and whom it trusts (None: the usual authorities)."""

    client: Any
    credentials: Any
    ca_bundle: str | None


def make_client(settings: RemoteSettings, *, connections: int) -> Sdk:
    """Credentials come from the standard chain: environment, profile, container, instance."""
    config = Config(
        region_name=settings.region or None,
        signature_version="s3v4",  # by default a signed URL still gets version 2 in some regions
        retries={"total_max_attempts": 1},
        max_pool_connections=connections + SPARE_CONNECTIONS,
        connect_timeout=connect_timeout_s(settings),
        read_timeout=read_timeout_s(settings),
        tcp_keepalive=True,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        user_agent_appid="aof2",
        s3={
            "addressing_style": "path" if settings.endpoint_url else "auto",
            "payload_signing_enabled": True if settings.endpoint_url else None,
        },
    )
    try:
        core = botocore.session.get_session()
        session = boto3.session.Session(botocore_session=core)
        client = session.client("s3", endpoint_url=settings.endpoint_url or None, config=config)
        return Sdk(client, session.get_credentials(), core.get_config_variable("ca_bundle"))
    except (sdk.NoRegionError, sdk.InvalidRegionError):
        raise ValueError(
            f'remote.region = "{settings.region}": allowed is the name of a region, eu-west-1 say'
        ) from None
    except _NO_CREDENTIALS as e:
        raise RemoteAuthError(f"opening the remote: {type(e).__name__}") from None


def renewed(settings: RemoteSettings, used: Sdk, *, connections: int) -> Sdk | None:
    """A client with the keys that the chain gives now; None when they are those in use, or there are none."""
    try:
        fresh = botocore.session.get_session().get_credentials()
        if fresh is None or _frozen(fresh) == _frozen(used.credentials):
            return None
        return make_client(settings, connections=connections)
    except (sdk.BotoCoreError, RemoteAuthError, OSError):
        return None  # the chain itself fails: what was refused is asked again later


def _frozen(credentials: Any) -> tuple[str, str, str | None] | None:
    return None if credentials is None else tuple(credentials.get_frozen_credentials())[:3]


def answered(status: int, code: str, operation: str) -> sdk.ClientError:
    """The SDK's exception for an error that the server told by another way."""
    return sdk.ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, operation)


def translate(error: Exception, what: str) -> Aof2Error:
    """What the caller has to do about an exception of the SDK, the connection or the socket."""
    if isinstance(error, sdk.ClientError):
        return _from_answer(error, what)
    name = type(error).__name__
    if isinstance(error, _NO_CREDENTIALS):
        return RemoteAuthError(f"{what}: no usable AWS credentials ({name})")
    if isinstance(error, sdk.ParamValidationError):
        return RemoteRefusedError(f"{what}: the SDK refuses the request")
    if isinstance(error, sdk.SSLError):
        return RemoteUnavailableError(f"{what}: TLS failed ({name})")
    if isinstance(error, sdk.EndpointConnectionError):
        return RemoteUnavailableError(f"{what}: cannot connect to the remote")
    if isinstance(
        error, (sdk.ConnectTimeoutError, sdk.ReadTimeoutError, urllib3.exceptions.TimeoutError, TimeoutError)
    ):
        return RemoteUnavailableError(f"{what}: the remote does not answer ({name})")
    return RemoteUnavailableError(f"{what}: the connection failed ({name})")


def _from_answer(error: sdk.ClientError, what: str) -> Aof2Error:
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    said = f"{what}: {code if code and not code.isdigit() else f'HTTP {status}'}"
    if code in _THROTTLED or status == 429:
        return RemoteThrottledError(said)
    if code in ("NotImplemented", "MethodNotAllowed"):
        return RemoteRefusedError(said)
    if code == "NoSuchBucket":
        return RemoteUnavailableError(f"{said}: the bucket does not exist", retryable=False)
    if code == "NoSuchUpload":
        return UploadGoneError(said, retryable=False)
    if code in _AUTH or status in (401, 403, 301, 307):
        return RemoteAuthError(f"{said}: check keys, rights, region and clock")
    if status == 404:
        return RemoteMissingError(said)
    if status == 412:
        return PreconditionFailedError(said)
    if status == 416:
        return RangeError(said)
    if code in _DAMAGED_ON_THE_WAY or code in ("RequestTimeout", "InternalError") or status >= 500 or status == 408:
        return RemoteUnavailableError(said)
    return RemoteRefusedError(said)
