"""Ports: the range that goes round, explicit ones, conflicts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from teimgr.errors import InvalidPort, PortAllocationFailed, PortConflict
from teimgr.supervision.validation import LAST_PORT, Ports, is_free

HOST = "127.0.0.1"


@pytest.fixture
def start() -> int:
    """The first of five ports in a row that are free now."""
    return next(port for port in range(21000, 32000, 7) if all(is_free(HOST, port + step) for step in range(5)))


@pytest.fixture
def listeners() -> Iterator[ExitStack]:
    with ExitStack() as held:
        yield held


def listen(held: ExitStack, port: int) -> None:
    listener = held.enter_context(socket.socket())
    listener.bind((HOST, port))
    listener.listen()


@pytest.mark.clause("M5.2-ports")
def test_ports_are_handed_out_in_turn_so_that_one_given_up_rests(start: int) -> None:
    ports = Ports(HOST, start, start + 3, {})

    assert [ports.allocate(()) for _ in range(4)] == [start, start + 1, start + 2, start]


@pytest.mark.clause("M5.2-ports")
def test_taken_reserved_and_bound_ports_are_passed_over(start: int, listeners: ExitStack) -> None:
    listen(listeners, start + 2)
    ports = Ports(HOST, start, start + 5, {start + 1: "the API port"})

    assert ports.allocate({start}) == start + 3


@pytest.mark.clause("M2.4-no-port")
def test_a_full_range_says_so(start: int) -> None:
    ports = Ports(HOST, start, start + 2, {})

    with pytest.raises(PortAllocationFailed, match="Could not find free port in range"):
        ports.allocate({start, start + 1})


def test_a_free_port_may_be_had_by_number(start: int) -> None:
    assert Ports(HOST, 1024, 1025, {}).check(start, {}) == start


@pytest.mark.parametrize("port", [-1, 80, 1023, 65536])
def test_a_port_outside_the_unprivileged_range_is_refused(port: int) -> None:
    with pytest.raises(InvalidPort):
        Ports(HOST, 8080, 8180, {}).check(port, {})


def test_a_conflict_names_the_holder(start: int, listeners: ExitStack) -> None:
    listen(listeners, start)
    ports = Ports(HOST, 8080, 8180, {9000: "the API port"})

    for port, holders, holder in [
        (8085, {8085: "bge"}, "instance 'bge'"),
        (9000, {}, "the API port"),
        (start, {}, "another process"),
    ]:
        with pytest.raises(PortConflict, match=f"Port {port} already in use by {holder}"):
            ports.check(port, holders)


@pytest.mark.clause("M2.4-prometheus-port")
def test_prometheus_ports_count_upwards_and_never_repeat() -> None:
    ports = Ports(HOST, 8080, 8180, {9100: "the API port"})
    first = ports.allocate_prometheus(())

    assert first > 9100
    assert ports.allocate_prometheus({first + 1}) > first + 1


@pytest.mark.clause("M2.4-prometheus-port")
def test_prometheus_ports_begin_again_after_the_last_port() -> None:
    ports = Ports(HOST, 8080, 8180, {}, prometheus_start=LAST_PORT - 99)

    found = [ports.allocate_prometheus({LAST_PORT}) for _ in range(250)]
    assert set(found) <= set(range(LAST_PORT - 99, LAST_PORT))
    assert len(set(found)) > 50  # in turn; other programs may have some of them
