"""The real TEI's answers, replayed: what differs is decided, or within the bounds."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.conformance import recording
from tests.support.daemon_process import MINILM, WarmDaemonProcess

_READY_S = 100


@pytest.fixture(scope="module")
def replay() -> Iterator[recording.Replay]:
    with WarmDaemonProcess() as daemon, daemon.client() as client:
        for model in recording.MODELS:
            source = MINILM if model == "mini" else str(recording.FOLDER / "models" / model)
            client.create(model, source, dtype="float32", pooling=recording.POOLING.get(model))
        for model in recording.MODELS:
            client.wait_until_running(model, deadline_s=_READY_S)
        replay = recording.Replay({model: client.get(model).port for model in recording.MODELS})
        yield replay
        replay.close()


def test_every_line_is_answered_as_by_the_real_one(replay: recording.Replay) -> None:
    found = [(line, recording.level(line, replay.answer(line))) for line in recording.lines()]

    allowed = (recording.SAME, recording.DECIDED_LEVEL)
    assert [(line.id, line.path, level) for line, level in found if level not in allowed] == []
    assert recording.counts(found) == json.loads(recording.RESULT.read_text())
