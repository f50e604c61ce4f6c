"""`-o`: what there is, what is passed over, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from aof2.fs.options import Options, OptionsError, parse_options


def test_defaults() -> None:
    assert parse_options([]) == Options()
    assert Options() == Options(
        ro=False, allow_other=False, suid=False, dev=False, exec=True, passthrough=True, fsname="aof2", conf=None
    )


def test_everything() -> None:
    got = parse_options(
        ["ro,allow_other,uid=1000,gid=0", "umask=027,suid,dev,noexec", "nopassthrough,conf=/a b,fsname=x"]
    )
    assert got == Options(
        ro=True,
        allow_other=True,
        uid=1000,
        gid=0,
        umask=0o27,
        suid=True,
        dev=True,
        exec=False,
        passthrough=False,
        conf=Path("/a b"),
        fsname="x",
    )


def test_a_follower_is_read_only() -> None:
    assert parse_options(["follow"]) == Options(follow=True, ro=True)
    assert parse_options(["follow,rw"]) == Options(follow=True, ro=True)


def test_the_last_one_wins() -> None:
    got = parse_options(["ro,rw,suid,nosuid,allow_other,noallow_other,uid=1,uid=2"])
    assert got == Options(uid=2)


def test_what_mount_and_systemd_add() -> None:
    given = "defaults,_netdev,nofail,auto,noauto,user,users,noatime,relatime,x-systemd.automount,X-mount.mkdir,,user=me"
    assert parse_options([given]) == parse_options([])


BAD = """bogus ro=1 uid= uid=x uid=-1 uid=٣ uid=4294967295 umask=8 umask=1777 conf= fsname= fsname=a\tb"""


@pytest.mark.parametrize("bad", BAD.split(" "))
def test_refused_by_name(bad: str) -> None:
    with pytest.raises(OptionsError) as caught:
        parse_options([f"rw,{bad}"])
    assert bad.partition("=")[0] in str(caught.value)
    assert "\n" not in str(caught.value)
