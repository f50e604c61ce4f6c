"""Log lines: JSON, one a line, with the right fields and without secrets."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aof2.engine.observe.logs import REDACTED, JsonFormatter, configure_logging, log_event

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
KEY_ID = "AKIAIOSFODNN7EXAMPLE"

Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def logger() -> logging.Logger:
    return logging.getLogger("aof2.test_logs")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, logger: logging.Logger) -> Iterator[Lines]:
    """What was written so far, without the time, which every line has."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    stream = io.StringIO()
    handler = configure_logging(stream, logging.DEBUG, logger=logger.name)

    def read() -> list[dict[str, Any]]:
        text = stream.getvalue()
        assert text.isascii()
        assert text.count("\n") == len(text.splitlines())
        found = [json.loads(line) for line in text.splitlines()]
        assert all(line.pop("ts").endswith("Z") for line in found)
        return found

    yield read
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def head(event: str) -> dict[str, str]:
    return {"level": "INFO", "logger": "aof2.test_logs", "event": event}


def test_a_full_disk_gets_no_traceback(capfd: pytest.CaptureFixture[str], logger: logging.Logger) -> None:
    full = open("/dev/full", "w", buffering=1)
    handler = configure_logging(full, logger=logger.name)
    logger.info("no room for this")
    logger.removeHandler(handler)
    with pytest.raises(OSError, match="No space"):
        full.close()
    assert capfd.readouterr() == ("", "")


def test_an_event_has_exactly_its_fields(lines: Lines, logger: logging.Logger) -> None:
    log_event(logger, "checkpoint.started", job_id=7, tenant="db", plan_size_bytes=100, wal_range=(3, 9))
    log_event(logger, "checkpoint.failed", job_id="8", error="no room", stage="stage", retryable=True)
    assert lines() == [
        {**head("checkpoint.started"), "job_id": 7, "tenant": "db", "plan_size_bytes": 100, "wal_range": [3, 9]},
        {**head("checkpoint.failed"), "job_id": "8", "error": "no room", "stage": "stage", "retryable": True},
    ]


def test_ordinary_calls_keep_their_extra_fields(lines: Lines, logger: logging.Logger) -> None:
    logger.info("chunk %d sealed", 3, extra={"segment_id": 9, "chunk_index": 3, "chunk_offset": 64})
    (line,) = lines()
    assert line == {
        "level": "INFO", "logger": "aof2.test_logs", "message": "chunk 3 sealed",
        "segment_id": 9, "chunk_index": 3, "chunk_offset": 64,
    }  # fmt: skip


def test_the_time_is_utc_to_the_millisecond() -> None:
    record = logging.makeLogRecord({"name": "n", "levelname": "INFO", "msg": "m"})
    record.created = 1_700_000_000.1239
    assert json.loads(JsonFormatter().format(record))["ts"] == "2023-11-14T22:13:20.123Z"


def test_fields_may_be_called_anything(lines: Lines, logger: logging.Logger) -> None:
    log_event(logger, "e", name="n", args=1, module="m", message="x", ts=5, event="f", logger="l")
    (line,) = lines()
    assert line == {**head("e"), "name": "n", "args": 1, "module": "m", "message_": "x", "event_": "f",
                    "logger_": "l", "ts_": 5}  # fmt: skip


class Colour(Enum):
    RED = "red"


class Broken:
    def __str__(self) -> str:
        raise RuntimeError


def test_any_value_becomes_json(lines: Lines, logger: logging.Logger) -> None:
    loop: list[object] = []
    loop.append(loop)
    log_event(
        logger, "e",
        path=Path("/a/é"), data=b"\x00\xff", nan=float("nan"), inf=float("inf"), colour=Colour.RED,
        error=OSError(5, "no"), nested={"a": {1: (2, {3})}, "b": None}, odd="\udc80\n\u2028", loop=loop,
        flag=True, big=2**80,
    )  # fmt: skip
    (line,) = lines()
    assert line["path"] == "/a/é"
    assert line["data"] == "00ff"
    assert (line["nan"], line["inf"], line["colour"], line["big"]) == ("nan", "inf", "red", 2**80)
    assert line["error"] == "[Errno 5] no"
    assert line["nested"] == {"a": {"1": [2, [3]]}, "b": None}
    assert line["odd"] == "\udc80\n\u2028"
    assert line["flag"] is True


def test_a_line_that_cannot_be_built_says_so(lines: Lines, logger: logging.Logger) -> None:
    log_event(logger, "e.broken", field=Broken())
    (line,) = lines()
    assert line == {"level": "INFO", "logger": "aof2.test_logs", "message": "e.broken",
                    "log_error": "RuntimeError while formatting"}  # fmt: skip
    record = logging.makeLogRecord({"msg": "%d", "args": ("no number",)})
    line = json.loads(JsonFormatter().format(record))
    assert (line["message"], line["log_error"]) == ("%d", "TypeError while formatting")


@pytest.mark.expects_warnings
def test_exceptions_are_one_line(lines: Lines, logger: logging.Logger) -> None:
    try:
        raise ValueError(f"denied with {SECRET}")
    except ValueError:
        logger.exception("failed", stack_info=True)
    (line,) = lines()
    assert line["exception"].endswith(f"ValueError: denied with {REDACTED}")
    assert line["stack"].startswith("Stack")
    assert line["level"] == "ERROR"


@pytest.mark.parametrize(
    "text",
    [
        f"key {SECRET} used",
        f"id {KEY_ID}, ok",
        "GET https://b.s3/k?X-Amz-Signature=feedc0defeedc0de&x=1",
        f"GET https://b.s3/k?X-Amz-Credential={KEY_ID}%2F2026&x=1",
        "x-amz-security-token: feedc0defeedc0de",
        "Authorization: AWS4-HMAC-SHA256 Credential=x, Signature=feedc0defeedc0de",
        "{'Authorization': 'Basic feedc0defeedc0de'}",
        "bearer feedc0defeedc0de",
        "aws_session_token=feedc0defeedc0de",
        "https://user:feedc0defeedc0de@host/x",
    ],
)
def test_secrets_in_text_are_not_shown(lines: Lines, logger: logging.Logger, text: str) -> None:
    logger.info("%s", text)
    log_event(logger, "e", detail=text, nested=[{"deep": text}], error=RuntimeError(text))
    shown = json.dumps(lines())
    assert REDACTED in shown
    for secret in (SECRET, KEY_ID, "feedc0defeedc0de"):
        assert secret not in shown


@pytest.mark.parametrize(
    "name",
    ["secret", "aws_secret_access_key", "access_key", "AccessKeyId", "password", "session_token", "token",
     "Authorization", "credentials", "api_key", "X-Amz-Signature"],
)  # fmt: skip
def test_fields_called_like_secrets_are_not_shown(lines: Lines, logger: logging.Logger, name: str) -> None:
    log_event(logger, "e", **{name: "feedc0de", "nested": {name: ["feedc0de"]}})
    (line,) = lines()
    assert (line[name], line["nested"]) == (REDACTED, {name: REDACTED})


def test_what_is_no_secret_is_shown(lines: Lines, logger: logging.Logger) -> None:
    fields = {"key": "checkpoints/t/1/chunk-1-1-" + "ab" * 32 + ".blob", "idempotency_token": "t-1",
              "sha256": "ab" * 32, "url": "s3://bucket/prefix", "tenant": "keys"}  # fmt: skip
    log_event(logger, "e", **fields)
    assert lines() == [{**head("e"), **fields}]


def test_a_level_that_is_off_costs_nothing(lines: Lines, logger: logging.Logger) -> None:
    logger.setLevel(logging.WARNING)
    log_event(logger, "e", field=Broken())
    assert lines() == []


@given(
    st.text(), st.dictionaries(st.text(), st.recursive(st.text() | st.floats() | st.binary(), st.lists, max_leaves=4))
)
def test_any_record_is_one_line_of_json(message: str, fields: dict[str, object]) -> None:
    record = logging.makeLogRecord({"name": "n", "levelname": "INFO", "msg": message, "aof2_fields": fields})
    line = JsonFormatter().format(record)
    assert line.isascii()
    assert len(line.splitlines()) == 1
    assert {"ts", "level", "logger", "message"} <= json.loads(line).keys()
