"""The real TEI's answers, replayed: what differs is decided, or within the bounds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest

from teimgr.config.settings import Settings
from teimgr.control.placement.hosts import GpuInventory, Inventory
from teimgr.control.registry.cache import HubCache
from teimgr.control.registry.registry import Registry
from teimgr.observability.metrics import DaemonMetrics
from tests.conformance import grpc_recording, recording, rest_recording
from tests.support.daemon_process import MINILM, WarmDaemonProcess
from tests.support.rest_listener import Fleet, listening

_READY_S = 100


@pytest.fixture(scope="module")
def ports() -> Iterator[Mapping[str, int]]:
    """Ports of instances of the recorded models."""
    with WarmDaemonProcess() as daemon, daemon.client() as client:
        for model in recording.MODELS:
            source = MINILM if model == "mini" else str(recording.FOLDER / "models" / model)
            client.create(model, source, dtype="float32", pooling=recording.POOLING.get(model))
        for model in recording.MODELS:
            client.wait_until_running(model, deadline_s=_READY_S)
        yield {model: client.get(model).port for model in recording.MODELS}


@pytest.mark.timeout(400)
def test_every_line_is_answered_as_by_the_real_one(ports: Mapping[str, int]) -> None:
    with closing(recording.Replay(ports)) as replay:
        found = [(line, recording.level(line, replay.answer(line))) for line in recording.lines()]

    allowed = (recording.SAME, recording.DECIDED_LEVEL)
    assert [(line.id, line.path, level) for line, level in found if level not in allowed] == []
    assert recording.counts(found) == json.loads(recording.RESULT.read_text())


def test_every_grpc_call_is_answered_as_by_the_real_one(ports: Mapping[str, int]) -> None:
    with closing(grpc_recording.Replay(ports)) as replay:
        found = [(call, grpc_recording.level(call, replay.answer(call))) for call in grpc_recording.calls()]

    allowed = (recording.SAME, recording.DECIDED_LEVEL)
    assert [(call.id, call.method, level) for call, level in found if level not in allowed] == []
    assert recording.counts(found) == json.loads(grpc_recording.RESULT.read_text())


async def test_every_management_call_is_answered_as_by_the_real_one(tmp_path: Path) -> None:
    settings = Settings(state_file=tmp_path / "state.toml")
    settings.log_dir.mkdir()
    (settings.log_dir / "one.log").write_text("a line\n" * 8)
    made: list[Registry] = []

    def registry(fleet: Fleet, metrics: DaemonMetrics) -> Registry:
        gpus = GpuInventory({}, lambda: Inventory(reason="none in this test"))
        cache, environ = HubCache(tmp_path / "hub"), {"HF_HOME": str(tmp_path)}
        made.append(Registry(settings, None, gpus, metrics, fleet.list, cache, environ))  # type: ignore[arg-type]
        return made[-1]

    async with listening(settings, registry) as front, aiohttp.ClientSession(front.url) as http:
        found = [
            (call, rest_recording.level(call, await rest_recording.answer(http, front.url, call)))
            for call in rest_recording.calls()
        ]
        await made[0].close()

    allowed = (recording.SAME, recording.DECIDED_LEVEL, rest_recording.AS_JSON)
    assert [(call.number, call.method, call.path, level) for call, level in found if level not in allowed] == []
    assert recording.counts(found) == json.loads(rest_recording.RESULT.read_text())


def test_the_bounds_of_acceptance_hold_on_the_recording() -> None:
    """The share of what differs from TEI without a decision, by what differs."""
    for result in (recording.RESULT, grpc_recording.RESULT):
        levels = json.loads(result.read_text())
        whole = sum(levels.values()) - levels.get(recording.DECIDED_LEVEL, 0)
        share = {level: count / whole for level, count in levels.items()}
        words, position = share.get(recording.WORDS, 0), share.get(recording.POSITION, 0)
        assert share.get(recording.STATUS, 0) <= 0.003
        assert share.get(recording.VALUES, 0) + share.get(recording.HEADERS, 0) <= 0.003
        assert words <= 0.01
        assert words + position <= 0.03
        # A decision is no way around a bound: those are about a thirtieth of all lines.
        assert levels.get(recording.DECIDED_LEVEL, 0) <= 0.04 * sum(levels.values())
