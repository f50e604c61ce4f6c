"""The S3 server of tests/remote, for the few tests here that need a real one."""

from __future__ import annotations

from tests.remote.conftest import credentials, open_s3, seaweed

__all__ = ["credentials", "open_s3", "seaweed"]
