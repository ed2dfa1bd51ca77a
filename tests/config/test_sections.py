"""The table `[cluster]`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.config.loaded_settings import load

from teimgr.config.sections import address_on_host
from teimgr.config.settings import Settings
from teimgr.errors import InvalidConfig


def test_the_address_has_a_host_and_a_port(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text('[cluster]\naddress = "[fd00::1]:6379"\nlabels = { zone = "a" }\n')

    cluster = load(file, {}).cluster

    assert (cluster.host, cluster.port, cluster.labels) == ("fd00::1", 6379, {"zone": "a"})


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("10.0.0.1", "must be ADDRESS:PORT with a port of 1 to 65535"),
        ("10.0.0.1:0", "with a port of 1 to 65535"),
        ("head:6379", "must have a numeric address"),
        ("0.0.0.0:6379", "by which other hosts reach this one"),
        ("127.0.0.1:6379", "by which other hosts reach this one"),
    ],
)
def test_an_address_that_no_other_host_reaches_is_refused(tmp_path: Path, address: str, problem: str) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(f'[cluster]\naddress = "{address}"\n')

    with pytest.raises(InvalidConfig, match=rf"cluster\.address: .*{problem}"):
        load(file, {})


def test_without_the_table_there_is_one_host() -> None:
    assert Settings().cluster.address == ""


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("ray_port_start = 80\nray_port_end = 200", r"ray_port_start must be at least 1024 \(got 80\)"),
        ("ray_port_start = 20000", r"must be at least 16 above ray_port_start \(got 20000 and 0\)"),
        ("ray_port_start = 20000\nray_port_end = 20010", "at least 16 above"),
        ("ray_port_start = 6300\nray_port_end = 6400", r"the ports contain that of cluster\.address, 6379"),
    ],
)
def test_ports_that_ray_cannot_use_are_refused(tmp_path: Path, lines: str, problem: str) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(f'[cluster]\naddress = "10.0.0.1:6379"\n{lines}\n')

    with pytest.raises(InvalidConfig, match=problem):
        load(file, {})


@pytest.mark.parametrize(
    ("host", "there"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "0.0.0.0"),
        ("::", "::"),
        ("localhost", "localhost"),
        ("10.0.0.1", "10.0.0.2"),  # the head's in the fleet
        ("192.0.2.7", "10.0.0.2"),  # another one of the head
    ],
)
def test_another_host_listens_where_it_can(host: str, there: str) -> None:
    assert address_on_host(host, "10.0.0.1", "10.0.0.2") == there


def test_a_second_host_on_the_machine_has_its_own_loopback_address() -> None:
    assert address_on_host("127.0.0.2", "127.0.0.2", "127.0.0.3") == "127.0.0.3"
