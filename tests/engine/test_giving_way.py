"""Queries come in between the steps of a bulk job of images or sounds, whichever code computes these."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.engine.conftest import WAIT_S, Served
from tests.support.models.dual_encoders import (
    build_clap,
    build_clip,
    build_colmodernvbert,
    build_colpali,
    build_colqwen2,
    build_embedding_gemma2,
    build_gme,
    build_qwen3_vl_embedding,
    build_siglip2_naflex,
    file_of,
    noise,
    sound,
    sound_file,
)
from tests.support.native import needs_native_forward
from tests.support.polling import until

from teimgr.engine.batching.batch import PackedBatch
from teimgr.engine.batching.queue import QueueEntry
from teimgr.engine.job import Job, Lane, Output
from teimgr.engine.native_library import native_library
from teimgr.errors import InferenceFailed, Unavailable

BUILDERS: dict[str, Callable[[Path], Path]] = {
    "CLIP": build_clip,
    "SigLIP2 NaFlex": build_siglip2_naflex,
    "ColPali": build_colpali,
    "ColQwen2": build_colqwen2,
    "ColModernVBert": build_colmodernvbert,
    "Qwen3-VL": build_qwen3_vl_embedding,
    "GME": build_gme,
    "EmbeddingGemma2": build_embedding_gemma2,
    "CLAP": build_clap,
}
# Steps of a forward beside those within the native forward, which computes all layers of the first four; GME has four
# in each of two layers of images, seven in each of two of texts.
LEAST = {"CLIP": 1, "SigLIP2 NaFlex": 1, "ColPali": 3, "ColModernVBert": 3, "ColQwen2": 10, "CLAP": 10}
LEAST |= dict.fromkeys(("Qwen3-VL", "GME", "EmbeddingGemma2"), 22)


class Ordered(Served):
    """An engine with the moments when its jobs were delivered."""

    def __init__(self, path: Path) -> None:
        self.delivered_ns = dict[Job, int]()
        super().__init__(path)

    def _take(self, jobs: list[Job]) -> None:
        self.delivered_ns |= dict.fromkeys(jobs, time.monotonic_ns())
        super()._take(jobs)


class Steps:
    """Counts the steps of the forwards of images or sounds on the thread of bulk; at the first one a query comes. Where
    that thread serves both lanes the query is in the queue when the step ends, else it has been answered.
    """

    def __init__(self, served: Ordered, outputs: frozenset[Output]) -> None:
        self.count = 0
        self.query: Job | None = None
        self.in_forward = False
        self._served, self._outputs = served, outputs
        self.serves_both = len(served.engine._runners) == 1

    def take(self, own: Callable[[], None]) -> None:
        if self.in_forward and threading.current_thread() is self._served.engine._running[-1]:
            self.count += 1
            if self.query is None:
                sender = threading.Thread(target=self._send)
                sender.start()
                sender.join(WAIT_S)
                assert self.query is not None
                if self.serves_both:
                    queue = self._served.engine._queue
                    until(lambda: queue.texts(Lane.INTERACTIVE) > 0, "a query in the queue", WAIT_S)
                else:
                    self._served.wait(self.query)
        own()

    def run(self, own: Callable[..., Any], batch: PackedBatch, outputs: Any) -> Any:
        if not getattr(batch, "pictures", ()):
            return own(batch, outputs)
        self.in_forward = True
        try:
            return own(batch, outputs)
        finally:
            self.in_forward = False

    def _send(self) -> None:
        self.query = self._served.send(["a query"], outputs=self._outputs)


@needs_native_forward
@pytest.mark.parametrize("name", BUILDERS)
def test_a_query_comes_in_between_the_steps_of_a_bulk_job(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, served = native_library(), Ordered(BUILDERS[name](tmp_path / "model"))
    engine = served.engine
    outputs = frozenset({Output.MULTI_VECTOR if engine.layout.pages else Output.DENSE})
    steps = Steps(served, outputs)
    if steps.serves_both:
        runner = engine._runners[0]
        serve = runner._serve_between_steps
        monkeypatch.setattr(runner, "_serve_between_steps", lambda: steps.take(serve))
    else:
        assert library is not None
        wait = library.wait_for_foreground
        monkeypatch.setattr(library, "wait_for_foreground", lambda: steps.take(wait))
    model = engine._runners[-1]._model
    monkeypatch.setattr(model, "run", partial(steps.run, model.run))
    try:
        files: list[Any]
        if engine.layout.sound:
            files = [engine.sound(sound_file(sound(1.0, seed))) for seed in range(4)]
        else:
            files = [engine.picture(file_of(noise(120, 200, seed))) for seed in range(4)]
        bulk = served.wait(served.send(files, Lane.BULK, outputs=outputs))
        assert steps.query is not None
        served.wait(steps.query)
    finally:
        engine.close(1.0)
    assert not bulk.errors
    assert not steps.query.errors
    assert served.delivered_ns[steps.query] < served.delivered_ns[bulk]
    for job in (steps.query, bulk):  # each has its own times, whichever was computed within the other
        assert min(job.tokenization_ns, job.queue_ns, job.inference_ns) >= 0
        own_ns = served.delivered_ns[job] - job.submitted_ns
        assert job.tokenization_ns + job.queue_ns + job.inference_ns <= own_ns
    assert steps.count >= LEAST[name]


@needs_native_forward
def test_a_defect_in_a_query_within_a_bulk_job_fails_that_query_alone_and_makes_the_engine_unhealthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Ordered(build_gme(tmp_path / "model"))
    engine, outputs = served.engine, frozenset({Output.DENSE})
    steps = Steps(served, outputs)
    [runner] = engine._runners
    serve, execute = runner._serve_between_steps, runner._execute_last
    sizes: list[int] = []

    def broken(left: list[list[QueueEntry]]) -> None:
        if left[0][0].job.lane is Lane.INTERACTIVE:
            raise ValueError("a defect")
        sizes.append(sum(entry.texts for entry in left[-1]))
        execute(left)

    monkeypatch.setattr(runner, "_serve_between_steps", lambda: steps.take(serve))
    monkeypatch.setattr(runner, "_execute_last", broken)
    monkeypatch.setattr(runner._model, "run", partial(steps.run, runner._model.run))
    try:
        files = [engine.picture(file_of(noise(120, 200, seed))) for seed in range(4)]
        bulk = served.wait(served.send(files, Lane.BULK, outputs=outputs))
        assert not bulk.errors
        assert sum(sizes) == len(files)  # not run again in halves
        with pytest.raises(Unavailable, match="a defect"):
            engine.self_test(WAIT_S)
        assert steps.query is not None
        assert isinstance(served.wait(steps.query).errors[0], InferenceFailed)
    finally:
        engine.close(1.0)
