"""Join tokens and removed hosts over REST."""

from __future__ import annotations

from pathlib import Path

from tests.support.rest_listener import Front, failed

from teimgr.cluster.enrolment import JoinToken
from teimgr.cluster.enrolment_server import EnrolmentServer
from teimgr.cluster.messages import Versions


def enrolment(folder: Path) -> EnrolmentServer:
    return EnrolmentServer(folder, "head", Versions(teimgr="1", ray="2", python="3", torch="4"), lambda: "")


async def test_a_token_is_made_for_a_host_and_redeemed(front: Front, tmp_path: Path) -> None:
    server = front.app.state.enrolment = enrolment(tmp_path / "fleet")

    made = await front.call("POST", "/hosts/tokens", 201, json={"node": "two", "life_secs": 60})

    assert (made["node"], made["life_secs"]) == ("two", 60.0)
    server.enrolment.redeem(JoinToken.parse(made["token"]), "two")
    refused = await front.call("POST", "/hosts/tokens", 400, json={"life_secs": 0})
    assert "life: 0 s" in failed(refused, "VALIDATION_ERROR")


async def test_a_host_is_removed_once(front: Front, tmp_path: Path) -> None:
    server = front.app.state.enrolment = enrolment(tmp_path / "fleet")
    server.enrolment.redeem(JoinToken.parse(await server.join_token(None, 60)), "two")

    assert await front.call("DELETE", "/hosts/two", 200) == {"name": "two"}
    assert "No such host: two" in failed(await front.call("DELETE", "/hosts/two", 404), "OBJECT_NOT_FOUND")


async def test_a_fleet_of_one_host_makes_no_tokens(front: Front) -> None:
    refused = await front.call("POST", "/hosts/tokens", 501, json={})

    assert "the daemon has no [cluster] address" in failed(refused, "UNIMPLEMENTED")
