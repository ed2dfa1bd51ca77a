"""A reload over real workers: what it cannot carry out leaves what serves."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
from tests.support.fleet import Fleet

from teimgr.config.sources import Configuration, Source, read
from teimgr.control.supervision.reload import Reloader
from teimgr.spec import InstanceSpec, State

CONFIGURATION = """
state_file = "{folder}/state.toml"
[[instances]]
name = "a"
model_id = "fake"
port = 23100
"""


class Reloading:
    """A fleet of one running seed, `a`, whose configuration file the test changes."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._text = CONFIGURATION.format(folder=fleet.folder)
        self._source = Source(file=fleet.folder / "t.toml", environ={})
        self.configuration = self._written()
        self._reloader = Reloader(self._source, self.configuration, fleet.manager, lambda settings: None, fleet.events)

    def _written(self) -> Configuration:
        (self.fleet.folder / "t.toml").write_text(self._text)
        return read(self._source)

    async def with_seed(self, **keys: object) -> str | None:
        """Reload with other values of the seed's keys; the result is why that failed."""
        for key, value in keys.items():
            lines = [line for line in self._text.splitlines() if not line.startswith(f"{key} =")]
            self._text = "\n".join([*lines, f"{key} = {value!r}\n"])
        self._written()
        [step] = (await self._reloader.reload()).steps
        return step.error

    async def still_serves(self, pid: int | None) -> None:
        """The instance is that of before, and so is its place in the state file; it runs in the process `pid`."""
        assert (await self.fleet.running()).pid == pid
        assert [(spec.name, spec.port, spec.wanted_running) for spec in self.fleet.store.load().specs] == [
            ("a", 23100, True)
        ]


@pytest.fixture
async def reloading(fleet: Fleet) -> Reloading:
    made = Reloading(fleet)
    await fleet.manager.create(made.configuration.settings.instances[0])
    await fleet.running()
    return made


async def test_a_port_that_another_process_has_takes_no_instance_away(reloading: Reloading) -> None:
    """The instance was deleted, and the one in its place could not be created."""
    pid = reloading.fleet.manager.get("a").pid
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        assert f"Port {port}" in str(await reloading.with_seed(port=port))
    await reloading.still_serves(pid)


async def test_a_model_that_is_not_there_takes_no_instance_away(reloading: Reloading) -> None:
    pid = reloading.fleet.manager.get("a").pid
    assert "model_id" in str(await reloading.with_seed(port=23101, model_id="/not/there"))
    await reloading.still_serves(pid)


async def test_one_whose_successor_fails_after_all_is_put_back(
    reloading: Reloading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another program takes the port between the check and the creation."""
    fleet, busy = reloading.fleet, socket.socket()
    pid, delete = fleet.manager.get("a").pid, fleet.manager.delete

    async def delete_late(name: str) -> object:
        view = await delete(name)
        busy.bind(("127.0.0.1", 23102))
        busy.listen()
        return view

    monkeypatch.setattr(fleet.manager, "delete", delete_late)
    with busy:
        assert "Port 23102" in str(await reloading.with_seed(port=23102))
        again = await fleet.running(not_pid=pid)
        await reloading.still_serves(again.pid)


async def test_one_that_a_user_has_stopped_is_put_back_as_it_was(
    reloading: Reloading, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = reloading.fleet
    await fleet.manager.stop("a")
    create: Callable[[InstanceSpec], object] = fleet.manager._create

    async def refuse(spec: InstanceSpec) -> object:
        return await create(spec if spec.port != 23103 else InstanceSpec(name="a", model_id="fake", gpu_id=7))

    monkeypatch.setattr(fleet.manager, "_create", refuse)
    assert "GPU" in str(await reloading.with_seed(port=23103))
    assert [(view.spec.port, view.state) for view in fleet.manager.list()] == [(23100, State.STOPPED)]
    assert not fleet.store.load().specs[0].wanted_running


async def test_an_instance_may_keep_one_of_its_ports(reloading: Reloading) -> None:
    """Its own worker holds the port at the time of the check."""
    assert await reloading.with_seed(prometheus_port=23104) is None
    view = await reloading.fleet.running()
    assert (view.spec.port, view.spec.prometheus_port) == (23100, 23104)


async def test_an_instance_of_a_call_that_the_configuration_lists_is_none_of_calls_any_more(fleet: Fleet) -> None:
    await fleet.manager.create(InstanceSpec(name="a", model_id="fake", port=23100, by_call=True, by_key="one"))

    assert await Reloading(fleet).with_seed() is None

    spec = fleet.manager.get("a").spec
    assert (spec.seeded, spec.by_call, spec.by_key) == (True, False, "")
