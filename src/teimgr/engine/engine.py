"""The engine: a model on a device, fed by three threads.

    submit ─► tokenizer thread ─► queue ─► engine thread ─► finisher thread ─► deliver

On a GPU the finisher waits for the device while the engine thread already packs and starts the next batch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from teimgr.engine.fidelity_gate import PROBE_TEXTS
from teimgr.engine.finisher import Failures, Finisher
from teimgr.engine.intake import Intake
from teimgr.engine.job import InferOptions, Input, Job, Lane, Output, Pair, check_supported
from teimgr.engine.loading import EngineOptions, Parts, load_parts
from teimgr.engine.model import device_bytes, tensor_bytes
from teimgr.engine.queue import EntryQueue
from teimgr.engine.runner import Runner
from teimgr.engine.tokenizer import TokenSpan, cut
from teimgr.errors import ModelLoadFailed, Unavailable
from teimgr.spec import ModelInfo

# Of vectors of length 1, or of the largest weight or logit where that is above 1: far above what a batch's shape
# changes, far below another input's result.
_DIFFERENCE = 2e-2


class SelfTest(Job):
    """A known input for the first output of a model; `done` is set when it is answered."""

    __slots__ = ("_output", "done")

    def __init__(self, info: ModelInfo) -> None:
        self._output = Output(info.outputs[0])
        options = InferOptions(frozenset({self._output}), normalize=info.kind != "sparse", raw_scores=True)
        known: Input = Pair(*PROBE_TEXTS[1:3]) if info.kind == "reranker" else PROBE_TEXTS[1]
        super().__init__([known], options, Lane.INTERACTIVE)
        self.allocate_results(info.dimension, len(info.labels))
        self.done = threading.Event()

    def agrees_with(self, known: SelfTest) -> bool:
        """Whether the answer is that of an earlier proof, within what the shape of a batch changes."""
        here, there = self._answer(), known._answer()
        if self._output is Output.SPARSE:
            here, there = _over_one_vocabulary(self, known)
        if here.shape != there.shape:
            return False
        return bool(np.abs(here - there).max() <= _DIFFERENCE * max(1.0, float(np.abs(there).max())))

    def _answer(self) -> NDArray[np.float32]:
        """The numbers of the one row, [K] or [*, width]."""
        if self._output is Output.DENSE:
            return np.array(self.vectors[0])
        if self._output is Output.SCORES:
            return np.array(self.scores[0])
        rows = self.tokens_of if self._output is Output.TOKENS else self.multi_vectors
        row = rows[0] if rows else None
        return np.zeros(0, dtype=np.float32) if row is None else row


def _over_one_vocabulary(*proofs: SelfTest) -> tuple[NDArray[np.float32], ...]:
    """Sparse answers as vectors of one size: an entry near zero may be there once and not the other time."""
    answers = [proof.sparse[0] for proof in proofs]
    width = 1 + max((int(a.indices.max()) for a in answers if a is not None and len(a.indices)), default=0)
    vectors = tuple(np.zeros(width, dtype=np.float32) for _ in answers)
    for vector, answer in zip(vectors, answers, strict=True):
        if answer is not None:
            vector[answer.indices] = answer.values
    return vectors


__all__ = ["Engine", "EngineOptions", "EngineStats"]

log = logging.getLogger(__name__)

_RECENT_BATCH_S = 2.0
_FIRST_PROOF_S = 600.0
_LAST_BATCH_S = 2.0  # what runs when the grace is over may end, for this long
_LAST_ANSWERS_S = 1.0


@dataclass(frozen=True, slots=True)
class LaneStats:
    """One lane of the engine. Tokens that wait count a byte that is not tokenized yet as one."""

    queued_texts: int
    queued_tokens: int
    batches: int
    texts: int
    tokens: int
    expired_texts: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot; counts are since the start, `busy_s` is time with a batch on the device.

    `by_texts[k]` counts the batches of at most 2^k texts that have more than 2^(k-1), `by_tokens` likewise; `lanes` are
    by the lane's word. `padding_saved_tokens` is what padding each batch to its longest text would have added. The
    device's bytes are those of this process's allocator, now and at the most; 0 and None on the CPU.
    """

    queued_texts: int
    queued_tokens: int
    running_tokens: int
    batches: int
    texts: int
    tokens: int
    failed_texts: int
    busy_s: float
    healthy: bool
    by_texts: tuple[int, ...]
    by_tokens: tuple[int, ...]
    lanes: Mapping[str, LaneStats] = field(default_factory=dict)
    padding_saved_tokens: int = 0
    model_bytes: int = 0
    device_bytes: int = 0
    device_peak_bytes: int | None = None


class Engine:
    """A served model. Made by `load`; every method may be called from any thread."""

    def __init__(self, parts: Parts, options: EngineOptions, deliver: Callable[[list[Job]], None]) -> None:
        self.info = parts.info
        self._tokenizer = parts.tokenizer
        self._prompts = parts.prompts
        self._deliver_out = deliver
        self._sickness: str | None = None
        self._known: SelfTest | None = None
        self._device = parts.model.backbone.device
        self._model_bytes = tensor_bytes(parts.model)
        self._queue = EntryQueue(parts.limits)
        self._finisher = Finisher(self._deliver, self._fall_sick, parts.info.activation or "identity")
        self._runner = Runner(parts.model, self._queue, self._finisher, options.threads)
        self._intake = Intake(parts.tokenizer, self._queue, self._finisher, options.max_queued_tokens)
        self._tokenizing = self._thread("tokenizer", self._intake.run)
        self._running = self._thread("engine", self._runner.run)
        self._finishing = self._thread("finisher", self._finisher.run)

    @classmethod
    def load(cls, options: EngineOptions, deliver: Callable[[list[Job]], None]) -> Engine:
        """Load, try out and start a model; blocks until it has proved itself.

        `deliver` is called on the finisher thread, once per batch, with the jobs that became complete.

        Raises:
            ModelNotFound, InvalidConfig, ModelLoadFailed: trying again changes nothing.
            OutOfDeviceMemory: the model does not fit.
        """
        engine = cls(load_parts(options), options, deliver)
        engine._start()
        return engine

    def submit(self, job: Job) -> None:
        """Accept a job; never waits.

        Raises:
            WrongModelKind, InvalidInput: see `check`.
            Overloaded: too much waits in the job's lane.
            Unavailable: the engine is closing or broken.
        """
        if self._sickness is not None:
            raise Unavailable(self._sickness)
        self.check(job.options)
        job.allocate_results(self.info.dimension, len(self.info.labels))
        self._intake.put(job, self._prompts.reading(job.options))

    def check(self, options: InferOptions) -> None:
        """See that the model can do what `options` ask for.

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
        return self._tokenizer.tokenize(text, add_special_tokens, self._prompts.text(prompt_name))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of token ids.

        Raises:
            EmptyInput, TokenizerFailed
        """
        return self._tokenizer.decode(ids, skip_special_tokens)

    def cut(self, text: str, max_tokens: int, *, left: bool = False) -> str:
        """`text` without what is beyond `max_tokens` tokens at its end, or at its beginning where `left`.

        Raises:
            TokenizerFailed
        """
        return cut(self._tokenizer, text, max_tokens, left=left)

    def self_test(self, timeout_s: float) -> None:
        """Return when results are known to be right: a batch finished just now, or the known input goes through.

        Raises:
            Unavailable: no answer in time, another answer than at load, or a fault was seen before.
        """
        if self._sickness is None and time.monotonic() - self._finisher.counters.finished_at < _RECENT_BATCH_S:
            return
        if self._sickness is None:
            self._compare(self._proof(timeout_s))
        if self._sickness is not None:
            raise Unavailable(self._sickness)

    def set_threads(self, threads: int) -> None:
        """Use that many CPU threads from the next batch on."""
        self._runner.use_threads(threads)

    def stats(self) -> EngineStats:
        """A snapshot for display."""
        counters = self._finisher.counters
        held_bytes, peak_bytes = device_bytes(self._device)
        return EngineStats(
            queued_texts=len(self._queue),
            queued_tokens=sum(self._queue.tokens(lane) + self._intake.waiting(lane) for lane in Lane),
            running_tokens=self._runner.running_tokens,
            batches=counters.batches,
            texts=counters.texts,
            tokens=counters.tokens,
            failed_texts=counters.failed_texts,
            busy_s=counters.busy_ns / 1e9,
            healthy=self._sickness is None,
            by_texts=tuple(counters.by_texts),
            by_tokens=tuple(counters.by_tokens),
            lanes={lane.value: self._lane_stats(lane) for lane in Lane},
            padding_saved_tokens=counters.padding_saved,
            model_bytes=self._model_bytes,
            device_bytes=held_bytes,
            device_peak_bytes=peak_bytes,
        )

    def _lane_stats(self, lane: Lane) -> LaneStats:
        done = self._finisher.counters.lanes[lane]
        return LaneStats(
            queued_texts=self._queue.texts(lane),
            queued_tokens=self._queue.tokens(lane) + self._intake.waiting(lane),
            batches=done.batches,
            texts=done.texts,
            tokens=done.tokens,
            expired_texts=done.expired,
        )

    def close(self, grace_s: float) -> None:
        """Refuse new jobs, finish what waits within `grace_s`, fail the rest, stop the threads.

        It returns at most some 3 s after the grace, leaving behind a thread that hangs in the device.
        """
        deadline = time.monotonic() + grace_s
        self._intake.close()
        if not _ended(self._tokenizing, deadline):
            self._intake.abandon()
        self._queue.close()
        if not _ended(self._running, deadline):
            self._queue.abandon()
        for thread in (self._tokenizing, self._running):
            _ended(thread, deadline + _LAST_BATCH_S)
        self._close_finisher(max(deadline, time.monotonic()) + _LAST_ANSWERS_S)

    def _close_finisher(self, deadline: float) -> None:
        self._fail_leftovers(deadline)
        self._finisher.close(deadline - time.monotonic())
        if not _ended(self._finishing, deadline):
            self._finisher.abandon()

    def _start(self) -> None:
        for thread in (self._tokenizing, self._running, self._finishing):
            thread.start()
        try:
            self._known = self._proof(_FIRST_PROOF_S)
        except Unavailable as error:
            self.close(grace_s=0.0)
            raise ModelLoadFailed(self._sickness or error.message) from error

    def _thread(self, name: str, body: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=self._supervise, args=(body,), name=f"teimgr-{name}", daemon=True)

    def _supervise(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # whatever it was: the engine says that it is broken, and is restarted
            log.exception("the %s thread died", threading.current_thread().name)
            self._fall_sick(f"the engine has a defect: {error!r}")

    def _deliver(self, jobs: list[Job]) -> None:
        for job in jobs:
            if isinstance(job, SelfTest):
                job.done.set()
        if others := [job for job in jobs if not isinstance(job, SelfTest)]:
            self._deliver_out(others)

    def _fall_sick(self, reason: str) -> None:
        if self._sickness is None:
            log.error("unhealthy from now on: %s", reason)
            self._sickness = reason

    def _proof(self, timeout_s: float) -> SelfTest:
        proof = SelfTest(self.info)
        self._intake.put(proof, self._prompts.reading(proof.options), bounded=False)
        if not proof.done.wait(timeout_s):
            proof.cancel()
            raise Unavailable(self._sickness or f"the device gave no answer within {timeout_s:g} s")
        if 0 in proof.errors:
            raise Unavailable(proof.errors[0].message)
        return proof

    def _compare(self, proof: SelfTest) -> None:
        if self._known is None or not proof.agrees_with(self._known):
            self._fall_sick("the known text has another vector than when the model was loaded")

    def _fail_leftovers(self, deadline: float) -> None:
        error = Unavailable("the engine was closed")
        waiting = self._intake.drain() + [(entry.job, entry.row) for entry in self._queue.drain()]
        if rows := [(job, row, error) for job, row in waiting]:
            self._finisher.put(Failures(rows), deadline - time.monotonic())


def _ended(thread: threading.Thread, deadline: float) -> bool:
    thread.join(max(0.0, deadline - time.monotonic()))
    return not thread.is_alive()
