"""The engine: a model on a device, fed by three threads.

    submit ─► tokenizer thread ─► queue ─► engine thread ─► finisher thread ─► deliver

On a GPU the finisher waits for the device while the engine thread already packs and starts the next batch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from teimgr.engine.fidelity_gate import PROBE_TEXTS
from teimgr.engine.finisher import EngineStats, Failures, Finisher
from teimgr.engine.intake import Intake
from teimgr.engine.job import InferOptions, Input, Job, Lane, Output, Pair, check_supported
from teimgr.engine.loading import EngineOptions, EngineParts, load_parts
from teimgr.engine.model import tensor_bytes
from teimgr.engine.queue import EntryQueue
from teimgr.engine.runner import Runner
from teimgr.engine.tokenizer import TokenSpan
from teimgr.errors import ModelLoadFailed, Unavailable
from teimgr.spec import Kind, LoadedModel

__all__ = ["Engine", "EngineOptions", "EngineStats"]

log = logging.getLogger(__name__)

_RECENT_BATCH_S = 2.0  # a batch finished this lately stands for a self-test
_FIRST_SELF_TEST_S = 600.0
_LAST_BATCH_S = 2.0  # extra time for the batch that runs when the grace period is over
_LAST_ANSWERS_S = 1.0
# The largest difference between the results of two self-tests: of vectors of length 1, else relative to the largest
# weight or logit where that is above 1. Far above the effect of a batch's shape, far below another input's result.
_SELF_TEST_TOLERANCE = 2e-2


class Engine:
    """A served model. Made by `load`; every method may be called from any thread."""

    def __init__(self, parts: EngineParts, options: EngineOptions, deliver: Callable[[list[Job]], None]) -> None:
        self.info = parts.info
        self.tokenizer = parts.tokenizer
        self._prompts = parts.prompts
        self._deliver_out = deliver
        self._fault: str | None = None  # why the engine is unhealthy; never reset
        self._reference: SelfTest | None = None
        self._device = parts.model.backbone.device
        self._model_bytes = tensor_bytes(parts.model)
        self._queue = EntryQueue(parts.limits)
        self._finisher = Finisher(self._deliver, self._mark_unhealthy, parts.info.activation or "identity")
        self._runner = Runner(parts.model, self._queue, self._finisher, options.threads)
        self._intake = Intake(parts.tokenizer, self._queue, self._finisher, options.max_queued_tokens)
        self._tokenizing = self._thread("tokenizer", self._intake.run)
        self._running = self._thread("engine", self._runner.run)
        self._finishing = self._thread("finisher", self._finisher.run)

    @classmethod
    def load(cls, options: EngineOptions, deliver: Callable[[list[Job]], None]) -> Engine:
        """Load and start a model; blocks until its first self-test has passed.

        `deliver` is called on the finisher thread, once per batch, with the jobs that became complete.

        Raises:
            ModelNotFound, InvalidConfig, ModelLoadFailed: trying again changes nothing.
            OutOfDeviceMemory: the model does not fit.
        """
        engine = cls(load_parts(options), options, deliver)
        for thread in (engine._tokenizing, engine._running, engine._finishing):
            thread.start()
        try:
            engine._reference = engine._run_self_test(_FIRST_SELF_TEST_S)
        except Unavailable as error:
            engine.close(grace_s=0.0)
            raise ModelLoadFailed(engine._fault or error.message) from error
        return engine

    def submit(self, job: Job) -> None:
        """Accept a job; never waits.

        Raises:
            WrongModelKind, InvalidInput: see `check`.
            Overloaded: too much waits in the job's lane.
            Unavailable: the engine is closing or broken.
        """
        if self._fault is not None:
            raise Unavailable(self._fault)
        self.check(job.options)
        job.allocate_results(self.info.dimension, len(self.info.labels))
        self._intake.put(job, self._prompts.tokenize_options(job.options))

    def check(self, options: InferOptions) -> None:
        """Check that the model supports `options`.

        Raises:
            WrongModelKind: it lacks an output, or cannot normalise it.
            InvalidInput: bad `dimensions` or `prompt_name`.
        """
        check_supported(self.info, options)
        self._prompts.text(options.prompt_name)

    def tokenize(self, text: str, add_special_tokens: bool, prompt_name: str | None) -> list[TokenSpan]:
        """Every token of prompt + text.

        Raises:
            EmptyInput, InvalidInput, TokenizerFailed
        """
        return self.tokenizer.tokenize(text, add_special_tokens, self._prompts.text(prompt_name))

    def self_test(self, timeout_s: float) -> None:
        """Verify the model's results: a batch finished just now, or a fixed input gives the same result as at load.

        Raises:
            Unavailable: no answer in time, another answer than at load, or a fault was seen before.
        """
        if self._fault is None and time.monotonic() - self._finisher.finished_at < _RECENT_BATCH_S:
            return
        if self._fault is None:
            test = self._run_self_test(timeout_s)
            if self._reference is None or not test.agrees_with(self._reference):
                self._mark_unhealthy("the known text has another vector than when the model was loaded")
        if self._fault is not None:
            raise Unavailable(self._fault)

    def set_threads(self, threads: int) -> None:
        self._runner.use_threads(threads)

    def stats(self) -> EngineStats:
        done, on_cuda = self._finisher.stats, self._device.type == "cuda"
        waiting = {lane.value: self._queue.tokens(lane) + self._intake.waiting(lane) for lane in Lane}
        return replace(
            done,
            queued_texts=len(self._queue),
            queued_tokens=sum(waiting.values()),
            running_tokens=self._runner.running_tokens,
            healthy=self._fault is None,
            by_texts=list(done.by_texts),
            by_tokens=list(done.by_tokens),
            lanes={
                lane.value: replace(
                    done.lanes[lane.value], queued_texts=self._queue.texts(lane), queued_tokens=waiting[lane.value]
                )
                for lane in Lane
            },
            model_bytes=self._model_bytes,
            device_bytes=torch.cuda.memory_reserved(self._device) if on_cuda else 0,
            device_peak_bytes=torch.cuda.max_memory_allocated(self._device) if on_cuda else None,
        )

    def close(self, grace_s: float) -> None:
        """Refuse new jobs, finish queued ones within `grace_s`, fail the rest, stop the threads.

        Returns at most some 3 s after the grace period, leaving behind a thread that hangs in the device.
        """
        deadline = time.monotonic() + grace_s
        self._intake.close()
        if not _joined(self._tokenizing, deadline):
            self._intake.abandon()
        self._queue.close()
        if not _joined(self._running, deadline):
            self._queue.abandon()
        for thread in (self._tokenizing, self._running):
            _joined(thread, deadline + _LAST_BATCH_S)
        last = max(deadline, time.monotonic()) + _LAST_ANSWERS_S
        error = Unavailable("the engine was closed")
        waiting = self._intake.drain() + [(entry.job, entry.row) for entry in self._queue.drain()]
        if rows := [(job, row, error) for job, row in waiting]:
            self._finisher.put(Failures(rows), last - time.monotonic())
        self._finisher.close(last - time.monotonic())
        if not _joined(self._finishing, last):
            self._finisher.abandon()

    def _thread(self, name: str, body: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=self._supervise, args=(body,), name=f"teimgr-{name}", daemon=True)

    def _supervise(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # of any kind: an engine without this thread must be restarted
            log.exception("the %s thread died", threading.current_thread().name)
            self._mark_unhealthy(f"the engine has a defect: {error!r}")

    def _deliver(self, jobs: list[Job]) -> None:
        for job in jobs:
            if isinstance(job, SelfTest):
                job.done.set()
        if others := [job for job in jobs if not isinstance(job, SelfTest)]:
            self._deliver_out(others)

    def _mark_unhealthy(self, reason: str) -> None:
        if self._fault is None:
            log.error("unhealthy from now on: %s", reason)
            self._fault = reason

    def _run_self_test(self, timeout_s: float) -> SelfTest:
        test = SelfTest(self.info)
        self._intake.put(test, self._prompts.tokenize_options(test.options), bounded=False)
        if not test.done.wait(timeout_s):
            test.cancel()
            raise Unavailable(self._fault or f"the device gave no answer within {timeout_s:g} s")
        if 0 in test.errors:
            raise Unavailable(test.errors[0].message)
        return test


class SelfTest(Job):
    """A fixed input for the first of a model's outputs; `done` is set when it is answered."""

    __slots__ = ("_output", "done")

    def __init__(self, info: LoadedModel) -> None:
        self._output = Output(info.outputs[0])
        options = InferOptions(frozenset({self._output}), normalize=info.kind != Kind.SPARSE, raw_scores=True)
        known: Input = Pair(*PROBE_TEXTS[1:3]) if info.kind == Kind.RERANKER else PROBE_TEXTS[1]
        super().__init__([known], options, Lane.INTERACTIVE)
        self.allocate_results(info.dimension, len(info.labels))
        self.done = threading.Event()

    def agrees_with(self, reference: SelfTest) -> bool:
        """Whether the results of both are equal, up to the effect of a batch's shape."""
        here, there = self._result(), reference._result()
        if here.shape != there.shape:
            return False
        return bool(np.abs(here - there).max() <= _SELF_TEST_TOLERANCE * max(1.0, float(np.abs(there).max())))

    def _result(self) -> NDArray[np.float32]:
        """The numbers of the one row, [K] or [*, width]. No model's first output is SPARSE."""
        if self._output is Output.DENSE:
            return np.array(self.vectors[0])
        if self._output is Output.SCORES:
            return np.array(self.scores[0])
        rows = self.tokens_of if self._output is Output.TOKENS else self.multi_vectors
        row = rows[0] if rows else None
        return np.zeros(0, dtype=np.float32) if row is None else row


def _joined(thread: threading.Thread, deadline: float) -> bool:
    thread.join(max(0.0, deadline - time.monotonic()))
    return not thread.is_alive()
