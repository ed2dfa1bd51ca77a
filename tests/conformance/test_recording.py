"""The real TEI's answers, replayed: what differs is decided, or within the bounds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing

import pytest

from tests.conformance import grpc_recording, recording
from tests.support.daemon_process import MINILM, WarmDaemonProcess

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
