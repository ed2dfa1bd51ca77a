"""Phases, displacement and time limits of the connections of a port."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from teimgr.http import connection_gate
from teimgr.http.connection_gate import LIMITS, ConnectionGate, Phase, PhaseLimit, SharedLimit, Ticket, network_of
from tests.support.polling import eventually

DESIGN = Path(__file__).parents[2] / "DESIGN.md"


class Held:
    """The holder of a ticket, that notes what the gate tells it."""

    def __init__(self, gate: ConnectionGate, client: str = "192.0.2.1", phase: Phase = Phase.HEAD) -> None:
        ticket = gate.admit(client)
        assert ticket is not None
        self.ticket: Ticket = ticket
        self.told: list[Phase | str] = []
        assert ticket.hand_to(self)
        ticket.enter(phase)

    def on_expired(self, phase: Phase) -> None:
        self.told.append(phase)

    def on_displaced(self) -> None:
        self.told.append("displaced")


async def test_a_connection_that_takes_too_long_is_told_then_closing_then_aborted() -> None:
    limits = {Phase.HEAD: PhaseLimit(0.02), Phase.CLOSING: PhaseLimit(0.02)}
    gate = ConnectionGate(limits=limits)
    slow, quick = Held(gate), Held(gate)
    quick.ticket.enter(Phase.IDLE)

    await eventually(lambda: slow.told == [Phase.HEAD, "displaced"])

    assert slow.ticket.phase is None
    assert quick.told == []
    assert gate.count == 1


async def test_a_renewed_phase_lasts_again() -> None:
    gate = ConnectionGate(limits={Phase.BODY: PhaseLimit(0.05)})
    held = Held(gate, phase=Phase.BODY)

    def renew(phase: Phase) -> None:
        held.told.append(phase)
        held.ticket.renew()

    held.on_expired = renew  # type: ignore[method-assign]
    await eventually(lambda: len(held.told) == 3)

    assert held.ticket.phase is Phase.BODY
    held.ticket.leave()


@pytest.mark.parametrize("phase", Phase)
async def test_a_full_port_makes_room_at_the_cost_of_what_is_worth_least(phase: Phase) -> None:
    gate = ConnectionGate(4)
    served = [Held(gate, phase=busy) for busy in (Phase.ANSWER, Phase.BODY)]
    old, recent = Held(gate, phase=phase), Held(gate, phase=phase)

    if phase in (Phase.ANSWER, Phase.BODY):
        assert gate.admit("192.0.2.2") is None
        assert old.told == []
    else:
        assert gate.admit("192.0.2.2") is not None
        assert old.told == ["displaced"]
    assert recent.told == served[0].told == served[1].told == []
    assert gate.count == 4


async def test_answered_clients_that_still_send_go_before_silent_ones_and_these_before_idle_ones() -> None:
    gate = ConnectionGate(3)
    idle, silent, discard = (Held(gate, phase=phase) for phase in (Phase.IDLE, Phase.HEAD, Phase.DISCARD))

    fresh = [Held(gate, phase=Phase.ANSWER) for _ in range(2)]
    assert discard.told == silent.told == ["displaced"]
    assert idle.told == []

    fresh.append(Held(gate, phase=Phase.ANSWER))
    assert idle.told == ["displaced"]
    assert gate.admit("192.0.2.1") is None


async def test_an_address_displaces_its_own_beyond_its_share_and_any_beyond_the_phases() -> None:
    gate = ConnectionGate(100, {Phase.HANDSHAKE: PhaseLimit(60.0, connections=5, per_address=3)})
    other = Held(gate, "2001:db8::1", Phase.HANDSHAKE)
    many = [Held(gate, f"2001:db8:0:1::{number}", Phase.HANDSHAKE) for number in range(1, 9)]

    assert other.told == []
    assert [each.told for each in many] == [["displaced"]] * 5 + [[]] * 3

    others = [Held(gate, f"192.0.2.{number}", Phase.HANDSHAKE) for number in range(5)]
    assert other.told == ["displaced"]
    assert [each.told for each in others] == [[]] * 5
    assert gate.count == 5


async def test_ports_with_a_shared_limit_make_room_where_most_connections_are() -> None:
    shared = SharedLimit(6)
    crowded, quiet = ConnectionGate(5, shared=shared), ConnectionGate(5, shared=shared)
    served, silent = Held(quiet, phase=Phase.ANSWER), Held(quiet)
    flood = [Held(crowded) for _ in range(8)]

    assert (crowded.count, quiet.count) == (4, 2)
    assert [each.told for each in flood] == [["displaced"]] * 4 + [[]] * 4
    assert served.told == silent.told == []

    more = Held(quiet)
    assert (crowded.count, quiet.count) == (3, 3)
    assert more.told == silent.told == []
    for each in (*flood[5:], silent, more):
        each.ticket.enter(Phase.ANSWER)
    assert quiet.admit("192.0.2.1") is None
    assert crowded.admit("192.0.2.1") is None
    served.ticket.leave()
    assert crowded.admit("192.0.2.1") is not None


async def test_a_small_ports_phases_have_smaller_shares() -> None:
    gate = ConnectionGate(8)

    for number in range(20):
        Held(gate, f"192.0.2.{number}", Phase.SILENT)

    assert gate.count == 4


async def test_what_is_held_is_bounded_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_gate, "HELD_BYTES", 100)
    gate = ConnectionGate()
    first, second = Held(gate), Held(gate)
    first.ticket.hold(60)
    assert second.ticket.has_room(40)
    assert not second.ticket.has_room(41)
    second.ticket.hold(41)

    assert first.told == ["displaced"]
    assert gate.held_bytes == 41
    second.ticket.hold(101)
    assert second.told == ["displaced"]
    assert (gate.held_bytes, gate.count) == (0, 0)


async def test_many_that_expire_at_once_leave_turns_to_others() -> None:
    gate = ConnectionGate(100_000, {Phase.HEAD: PhaseLimit(0.01), Phase.CLOSING: LIMITS[Phase.CLOSING]})
    held = [Held(gate) for _ in range(3000)]
    turns = 0
    while not held[-1].told:
        await asyncio.sleep(0)
        turns += bool(held[0].told)

    assert turns >= 3000 // connection_gate._CLOSED_PER_TURN


async def test_the_cost_of_a_phase_does_not_grow_with_the_connections() -> None:
    """The first key of a plain dict is found in a time that grows with the deletions before it."""

    def seconds(count: int) -> float:
        gate = ConnectionGate(count)
        for _ in range(count):
            Held(gate)
        began = time.perf_counter()
        for _ in range(2000):
            gate.admit("192.0.2.9")
        return time.perf_counter() - began

    assert min(seconds(20_000) for _ in range(2)) < 10 * min(seconds(1000) for _ in range(3))


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8:0:0:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("", "", True),
    ],
)
def test_what_counts_as_one_client(one: str, other: str, are_same: bool) -> None:
    assert (network_of(one) == network_of(other)) is are_same


def test_the_table_in_the_design_has_the_limits() -> None:
    rows = [line.strip("| ").split(" | ") for line in DESIGN.read_text().splitlines() if line.startswith("|")]
    shown = {row[0]: row[1:] for row in rows if row[0].upper() in Phase.__members__ and len(row) == 5}

    def cells(limit: PhaseLimit) -> list[str]:
        counts = (limit.bytes, limit.connections, limit.per_address)
        return [f"{limit.seconds:g}", *("–" if count is None else str(count) for count in counts)]

    assert shown == {phase.name.lower(): cells(limit) for phase, limit in LIMITS.items()}


def test_what_a_proxy_writes_in_place_of_an_address_counts_as_one_client() -> None:
    """RFC 7239 allows names, also with a port; they were a 500 on every route."""
    assert network_of("unknown:x") == "unknown:x"
