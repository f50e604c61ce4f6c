"""Callers that wait at the same time: when they share an upload of the log, and when one of them is alone."""

from __future__ import annotations

import pytest

from aof2.engine.env import Env
from aof2.engine.replicate.company import JUST_CAME_S, Caller, Company
from aof2.engine.replicate.position import Replication

STREAM = 1


def company_of(count: int) -> tuple[Company, list[Caller]]:
    company = Company(STREAM)
    callers = [Caller(0.0) for _ in range(count)]
    for caller in callers:
        company.joins(caller)
        caller.begins(STREAM, soon=True)
    return company, callers


@pytest.mark.parametrize("count", [1, 2, 3, 100, 512])
def test_uploads_of_many_are_few(count: int) -> None:
    """However far apart they become ready, and though each upload is done before the next one is."""
    company, callers = company_of(count)
    sealed = uploads = 0
    for end, caller in enumerate(callers, 1):
        caller.becomes_ready(STREAM, end)
        if due := company.due(sealed, 1e9):
            assert due == end
            sealed, uploads = due, uploads + 1
    assert sealed == count
    assert uploads <= count.bit_length()


def test_one_beside_another_is_not_held_up() -> None:
    company, (one, _) = company_of(2)
    one.becomes_ready(STREAM, 7)
    assert company.due(0, 0.0) == 7
    assert company.due(7, 0.0) == 0


def test_only_those_that_are_ready_soon_are_waited_for() -> None:
    company, (one, *others) = company_of(4)
    one.becomes_ready(STREAM, 7)
    assert company.due(0, 0.0) == 0
    for other in others:
        other.begins(STREAM, soon=False)
    assert company.due(0, 0.0) == 7
    for _ in range(3):
        company.joins(Caller(0.0))
    assert company.due(0, JUST_CAME_S / 2) == 0
    assert company.due(0, JUST_CAME_S) == 7


def test_who_goes_away_is_not_waited_for() -> None:
    replication = Replication(Env())
    asked: list[int] = []
    replication.on_wanted = asked.append
    with replication.waited_for([STREAM]) as one:
        with replication.waited_for([STREAM]), replication.waited_for([STREAM]):
            replication.want({STREAM: 5}, one)
            assert (asked, replication.wanted(STREAM)) == ([], 0)
        assert replication.wanted(STREAM) == 5
        assert asked == [STREAM]


def test_a_caller_without_company_asks_at_once() -> None:
    replication = Replication(Env())
    with replication.waited_for([STREAM]) as one:
        replication.want({STREAM: 5, 0: 3}, one)  # of the volume's own log, too, where it has none
        assert (replication.wanted(STREAM), replication.wanted(0)) == (5, 3)


def test_who_is_alone() -> None:
    replication = Replication(Env())
    assert not replication.is_lone(STREAM)
    with replication.waited_for([STREAM]) as one:
        assert replication.is_lone(STREAM)
        assert not replication.is_lone(STREAM + 1)
        with replication.waited_for([STREAM]) as other:
            assert not replication.is_lone(STREAM)
            other.begins(STREAM, soon=False)
            assert replication.is_lone(STREAM)
            other.becomes_ready(STREAM, 9)  # it needs an upload that the first may share
            one.begins(STREAM, soon=True)
            assert not replication.is_lone(STREAM)
        assert replication.is_lone(STREAM)
