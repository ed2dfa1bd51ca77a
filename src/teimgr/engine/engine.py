"""The engine: a model on a device, fed by three threads.

    submit ─► tokenizer thread ─► queue ─► engine thread ─► finisher thread ─► deliver

The engine thread's step is: take the next batch, pack it, start it on the device, hand it on. On a GPU the finisher
waits for the device while the engine thread already packs the next batch.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from teimgr.engine.batch import pack
from teimgr.engine.embedder import Embedder, load_embedder
from teimgr.engine.finisher import Failures, Finisher, Output
from teimgr.engine.intake import Intake
from teimgr.engine.job import EmbedOptions, Job, Lane
from teimgr.engine.layout import Layout, read_layout
from teimgr.engine.model import Batching
from teimgr.engine.probe import PROBE_TEXTS, Choice, choose
from teimgr.engine.queue import BatchLimits, Entry, EntryQueue
from teimgr.engine.tokenizer import TextTokenizer, Token, Truncation
from teimgr.errors import (
    DeadlineExceeded,
    InferenceFailed,
    InvalidConfig,
    InvalidInput,
    ModelLoadFailed,
    OutOfDeviceMemory,
    TeimgrError,
    Unavailable,
)
from teimgr.spec import ModelInfo

log = logging.getLogger(__name__)

_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_IDLE_WAIT_S = 1.0
_PROOF_TEXT = PROBE_TEXTS[1]
_PROOF_DIFFERENCE = 2e-2  # of vectors of length 1: far above what a batch's shape changes, far below another vector
_FRESH_PROOF_S = 2.0
# On a CPU temporaries above some 25 MB are mapped and unmapped by every operation, and more tokens gain nothing.
_CPU_BATCH_TOKENS = 2048
_CPU_TEMPORARY_BYTES = 25_000_000
_CPU_BULK_TOKENS_BESIDE_INTERACTIVE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What to load and where. `device` is "cpu" or "cuda" (the one visible GPU); `max_queued_tokens` is per lane."""

    path: Path
    model_id: str
    model_sha: str | None = None
    device: str = "cpu"
    dtype: str = "auto"
    pooling: str | None = None
    threads: int = 1
    max_batch_tokens: int = 16384
    max_batch_requests: int | None = None
    max_queued_tokens: int = 2_000_000
    default_prompt_name: str | None = None
    default_prompt: str | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot; counts are since the start, `busy_s` is time with a batch on the device."""

    queued_texts: int
    queued_tokens: int
    running_tokens: int
    batches: int
    texts: int
    tokens: int
    failed_texts: int
    busy_s: float
    healthy: bool


class Engine:
    """A served model. Made by `load`; every method may be called from any thread."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        embedder: Embedder,
        info: ModelInfo,
        options: EngineOptions,
        limits: BatchLimits,
        deliver: Callable[[list[Job]], None],
    ) -> None:
        self.info = info
        self._tokenizer = tokenizer
        self._embedder = embedder
        self._deliver_out = deliver
        self._queue = EntryQueue(limits)
        self._finisher = Finisher(self._deliver, self._fall_sick)
        self._intake = Intake(tokenizer, self._queue, self._finisher, options.max_queued_tokens)
        self._threads_wanted: int | None = None
        self._running_tokens = 0
        self._sickness: str | None = None
        self._known_vector: NDArray[np.float32] | None = None
        self._workers = [
            threading.Thread(target=self._supervise, args=(body,), name=f"teimgr-{name}", daemon=True)
            for name, body in (("tokenizer", self._intake.run), ("engine", self._run), ("finisher", self._finisher.run))
        ]

    @classmethod
    def load(cls, options: EngineOptions, deliver: Callable[[list[Job]], None]) -> Engine:
        """Load, try out and start a model; blocks until it has proved itself.

        `deliver` is called on the finisher thread with the jobs that became complete.

        Raises:
            ModelNotFound, InvalidConfig, ModelLoadFailed: trying again changes nothing.
            OutOfDeviceMemory: the model does not fit.
        """
        began = time.monotonic()
        torch.set_num_threads(options.threads)  # before any tensor operation: a forked child may not do one earlier
        layout = read_layout(options.path, options.pooling)
        for note in layout.notes:
            log.warning("%s: %s", options.model_id, note)
        max_length = min(layout.max_length, options.max_batch_tokens)
        tokenizer = TextTokenizer(layout, max_length, options.default_prompt_name, options.default_prompt)
        embedder, choice = _load_model(layout, options, tokenizer)
        info = _describe(options, layout, tokenizer, choice, time.monotonic() - began)
        engine = cls(tokenizer, embedder, info, options, _limits(layout, options, embedder), deliver)
        engine._start()
        return engine

    def submit(self, job: Job) -> None:
        """Accept a job; never waits.

        Raises:
            InvalidInput: bad `dimensions` or `prompt_name`.
            Overloaded: too much waits in the job's lane.
            Unavailable: the engine is closing or broken.
        """
        if self._sickness is not None:
            raise Unavailable(self._sickness)
        self.check(job.options)
        prompt = self._tokenizer.prompt(job.options.prompt_name)
        job.vectors = np.zeros((len(job.texts), job.options.dimensions or self.info.dimension), dtype=np.float32)
        self._intake.put(job, prompt)

    def check(self, options: EmbedOptions) -> None:
        """See that the model can do what `options` ask for.

        Raises:
            InvalidInput: bad `dimensions` or `prompt_name`.
        """
        dimensions = options.dimensions
        if dimensions is not None and dimensions < 1:
            raise InvalidInput("Input validation error: `dimensions` should be positive")
        if dimensions is not None and dimensions > self.info.dimension:
            raise InvalidInput(
                "Input validation error: `dimensions` should be smaller than the maximum embedding dimension."
            )
        self._tokenizer.prompt(options.prompt_name)

    def tokenize(self, text: str, add_special_tokens: bool, prompt_name: str | None) -> list[Token]:
        """Every token of prompt + text.

        Raises:
            EmptyInput, InvalidInput, TokenizerFailed
        """
        return self._tokenizer.tokenize(text, add_special_tokens, self._tokenizer.prompt(prompt_name))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of token ids.

        Raises:
            EmptyInput, TokenizerFailed
        """
        return self._tokenizer.decode(ids, skip_special_tokens)

    def prove(self, timeout_s: float) -> None:
        """Return when vectors are known to be right: a batch finished just now, or the known text goes through.

        Raises:
            Unavailable: no answer in time, another answer than at load, or a fault was seen before.
        """
        if self._sickness is None and time.monotonic() - self._finisher.counters.finished_at < _FRESH_PROOF_S:
            return
        if self._sickness is None:
            self._compare(self._vector_of_proof(timeout_s))
        if self._sickness is not None:
            raise Unavailable(self._sickness)

    def set_threads(self, threads: int) -> None:
        """Use that many CPU threads from the next batch on."""
        self._threads_wanted = threads

    def stats(self) -> EngineStats:
        """A snapshot for display."""
        counters = self._finisher.counters
        return EngineStats(
            queued_texts=len(self._queue),
            queued_tokens=sum(self._queue.tokens(lane) + self._intake.waiting(lane) for lane in Lane),
            running_tokens=self._running_tokens,
            batches=counters.batches,
            texts=counters.texts,
            tokens=counters.tokens,
            failed_texts=counters.failed_texts,
            busy_s=counters.busy_ns / 1e9,
            healthy=self._sickness is None,
        )

    def close(self, grace_s: float) -> None:
        """Refuse new jobs, finish what waits within `grace_s`, fail the rest, stop the threads."""
        deadline = time.monotonic() + grace_s
        tokenizing, running, finishing = self._workers
        self._intake.close()
        if not _ended(tokenizing, deadline):
            self._intake.abandon()
            tokenizing.join(_IDLE_WAIT_S)
        self._queue.close()
        if not _ended(running, deadline):
            self._queue.abandon()
            running.join(_IDLE_WAIT_S)
        self._fail_leftovers()
        self._finisher.close()
        finishing.join(_IDLE_WAIT_S)

    # The three threads.

    def _run(self) -> None:
        while (take := self._queue.next_batch(_IDLE_WAIT_S)) is not None:
            self._adopt_threads()
            if take.expired:
                self._fail(take.expired, DeadlineExceeded())
            if take.entries:
                self._running_tokens = take.tokens
                self._execute(take.entries)
                self._running_tokens = 0

    def _execute(self, entries: list[Entry]) -> None:
        """Run a batch. One that fails is run again in halves, so only the texts that cannot be served fail."""
        started_ns = time.monotonic_ns()
        try:
            batch = pack([e.ids for e in entries], [e.prompt_tokens for e in entries])
            vectors = self._embedder.embed(batch)
            output = Output([entries[i] for i in batch.order], _to_host(vectors), started_ns)
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:
            self._execute_halves(entries, error)
        else:
            self._finisher.put(output)

    def _execute_halves(self, entries: list[Entry], error: Exception) -> None:
        memory = _is_out_of_memory(error)
        if memory and self._embedder.transformer.device.type == "cuda":
            torch.cuda.empty_cache()
        if len(entries) > 1:
            log.warning("a batch of %d texts failed and is run in halves: %s", len(entries), error)
            middle = len(entries) // 2
            self._execute(entries[:middle])
            self._execute(entries[middle:])
        elif memory:
            self._fail(entries, OutOfDeviceMemory(f"A text of {entries[0].length} tokens does not fit the device"))
        else:
            log.error("a text failed by itself", exc_info=error)
            self._fail(entries, InferenceFailed(f"Backend error: {error}"))

    def _fail(self, entries: Sequence[Entry], error: TeimgrError) -> None:
        self._finisher.put(Failures([(entry.job, entry.row, error) for entry in entries]))

    def _adopt_threads(self) -> None:
        """OpenMP keeps the number per thread, so this one sets its own."""
        if self._threads_wanted is not None:
            torch.set_num_threads(self._threads_wanted)
            self._threads_wanted = None

    def _supervise(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            log.exception("the %s thread died", threading.current_thread().name)
            self._fall_sick(f"the engine has a defect: {error!r}")

    def _deliver(self, jobs: list[Job]) -> None:
        for job in jobs:
            if isinstance(job, _Proof):
                job.done.set()
        if others := [job for job in jobs if not isinstance(job, _Proof)]:
            self._deliver_out(others)

    def _fall_sick(self, reason: str) -> None:
        if self._sickness is None:
            log.error("unhealthy from now on: %s", reason)
            self._sickness = reason

    # Start, proof, end.

    def _start(self) -> None:
        for worker in self._workers:
            worker.start()
        self._known_vector = self._vector_of_proof(timeout_s=600.0)
        if self._sickness is not None:
            self.close(grace_s=0.0)
            raise ModelLoadFailed(self._sickness)
        _return_freed_memory()
        log.info(
            "%s serves on %s in %s, %s batching, %.2f s to load",
            self.info.model_id,
            self.info.device,
            self.info.dtype,
            self.info.batching,
            self.info.load_s,
        )

    def _vector_of_proof(self, timeout_s: float) -> NDArray[np.float32]:
        proof = _Proof(self.info.dimension)
        self._intake.put(proof, prompt="", bounded=False)
        if not proof.done.wait(timeout_s):
            proof.cancel()
            raise Unavailable(f"the device gave no answer within {timeout_s:g} s")
        if 0 in proof.errors:
            raise proof.errors[0]
        vector: NDArray[np.float32] = proof.vectors[0]
        return vector

    def _compare(self, vector: NDArray[np.float32]) -> None:
        if self._known_vector is None or np.abs(vector - self._known_vector).max() > _PROOF_DIFFERENCE:
            self._fall_sick("the known text has another vector than when the model was loaded")

    def _fail_leftovers(self) -> None:
        error = Unavailable("the engine was closed")
        if rows := [(job, row, error) for job, row in self._intake.drain()]:
            self._finisher.put(Failures(rows))
        if entries := self._queue.drain():
            self._fail(entries, error)


class _Proof(Job):
    """The engine's own question to itself."""

    __slots__ = ("done",)

    def __init__(self, dimension: int) -> None:
        super().__init__([_PROOF_TEXT], EmbedOptions(), Lane.INTERACTIVE)
        self.vectors = np.zeros((1, dimension), dtype=np.float32)
        self.done = threading.Event()


def _load_model(layout: Layout, options: EngineOptions, tokenizer: TextTokenizer) -> tuple[Embedder, Choice]:
    if options.dtype not in _DTYPES:
        raise InvalidConfig(f"dtype {options.dtype!r} is none of {', '.join(_DTYPES)}")
    device = torch.device(options.device)
    texts = [ids for ids in tokenizer.encode(PROBE_TEXTS, Truncation()) if not isinstance(ids, TeimgrError)]
    try:
        return choose(lambda: load_embedder(layout, device), _DTYPES[options.dtype], texts)
    except torch.OutOfMemoryError as error:
        raise OutOfDeviceMemory(f"the model does not fit the device: {error}") from error


def _describe(
    options: EngineOptions, layout: Layout, tokenizer: TextTokenizer, choice: Choice, load_s: float
) -> ModelInfo:
    log.info(
        "%s: cosine to float32 on known texts: mean %.6f, lowest %.6f",
        options.model_id,
        choice.mean_cosine,
        choice.min_cosine,
    )
    return ModelInfo(
        model_id=options.model_id,
        model_sha=options.model_sha,
        dtype=str(choice.dtype).removeprefix("torch."),
        device=options.device,
        kind="embedding",
        pooling=layout.pooling,
        dimension=choice.dimension,
        max_input_length=tokenizer.max_length,
        max_batch_tokens=options.max_batch_tokens,
        batching="equal-length" if choice.batching is Batching.EQUAL_LENGTH else "packed",
        prompts=tuple(layout.prompts),
        load_s=round(load_s, 3),
    )


def _limits(layout: Layout, options: EngineOptions, embedder: Embedder) -> BatchLimits:
    if options.device != "cpu":
        return BatchLimits(options.max_batch_tokens, options.max_batch_tokens, options.max_batch_requests)
    config = embedder.transformer.config
    widest = int(getattr(config, "intermediate_size", 0) or 4 * getattr(config, "hidden_size", 768))
    tokens = min(options.max_batch_tokens, _CPU_BATCH_TOKENS, max(256, _CPU_TEMPORARY_BYTES // (4 * widest)))
    return BatchLimits(tokens, min(tokens, _CPU_BULK_TOKENS_BESIDE_INTERACTIVE), options.max_batch_requests)


def _to_host(vectors: Tensor) -> Callable[[], NDArray[np.float32]]:
    """Start the copy of `vectors` to the host; the result waits for it."""
    if vectors.device.type == "cpu":
        return vectors.numpy
    host = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
    host.copy_(vectors, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def wait() -> NDArray[np.float32]:
        copied.synchronize()
        return host.numpy()

    return wait


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _ended(thread: threading.Thread, deadline: float) -> bool:
    thread.join(max(0.0, deadline - time.monotonic()))
    return not thread.is_alive()


def _return_freed_memory() -> None:
    """What loading freed goes back to the system; glibc would keep it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
