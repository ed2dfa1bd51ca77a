"""The engine: a model on a device. If the model is fast and nothing waits or runs, `start` computes a few short queries
on the calling thread:

    submit, start ─► tokenize ─► forward ─► deliver

Everything else passes through a few threads:

    submit, start ─► tokenizer threads ─► queue ─► engine thread ─► finisher thread ─► deliver

On a GPU the finisher waits for the device while the engine thread packs and starts the next batch. With the native
forward on a CPU, each lane has an engine thread: queries are computed at the same time as a bulk batch.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from teimgr.engine import gpu
from teimgr.engine.batching.queue import EntryQueue
from teimgr.engine.core_load import CoreLoad
from teimgr.engine.fidelity.fidelity_gate import PROBE_TEXTS
from teimgr.engine.finisher import EngineStats, Failures, Finisher, InFlightLimit, failed_rows
from teimgr.engine.intake import Intake
from teimgr.engine.job import (
    EQUAL,
    InferOptions,
    Input,
    Job,
    Lane,
    Output,
    Pair,
    Picture,
    Share,
    Sound,
    check_supported,
)
from teimgr.engine.known_results import OWN_TENANT, ResultCache
from teimgr.engine.loading import EngineOptions, EngineParts, load_parts
from teimgr.engine.model import tensor_bytes
from teimgr.engine.runner import Runner
from teimgr.engine.text.tokenizer import TokenizeOptions, TokenSpan
from teimgr.errors import DeadlineExceeded, DeviceFailed, InferenceFailed, ModelLoadFailed, Unavailable, WrongModelKind
from teimgr.models.source import shown_id
from teimgr.spec import CpuThreads, Kind, LoadedModel
from teimgr.wire.json_scan import Steps, completed

__all__ = ["Engine", "EngineOptions", "EngineStats"]

log = logging.getLogger(__name__)

_RECENT_BATCH_S = 2.0  # a batch finished within this time replaces a self-test
_FIRST_SELF_TEST_S = 600.0
_MAX_OPTIONS = 256  # checked options that are cached
_LAST_BATCH_S = 2.0  # extra time for a batch that runs at the end of the grace period
_LAST_ANSWERS_S = 1.0
# The largest difference between the results of two self-tests: of vectors of length 1, otherwise relative to the
# largest weight or logit above 1. The effect of a batch's shape is far smaller, that of another input far larger.
_SELF_TEST_TOLERANCE = 2e-2
_BAD_RESULT_PAUSE_S = 1.0  # between self-tests after bad results: texts that always fail must not fill the device
# A forward hangs if it takes ten times as long as the slowest recent one would for its size, and at least five seconds,
# which loading kernels of a new shape may take.
_HANG_FLOOR_S = 5.0
_HANG_FACTOR = 10.0


class Engine:
    """One served model on one device, made by `load`. Any thread may call its methods, except `stats` and
    `detect_hang`, which belong to one thread.
    """

    def __init__(
        self,
        parts: EngineParts,
        options: EngineOptions,
        deliver: Callable[[list[Job]], None],
        on_fault: Callable[[str], None],
    ) -> None:
        self.info = parts.info
        self.layout = parts.layout
        self.tokenizer = parts.tokenizer
        self.prompts = parts.prompts
        self._is_rounded = parts.layout.is_rounded
        self._deliver_out = deliver
        self._on_fault = on_fault
        self._fault: str | None = None  # the reason why it is unhealthy; never reset
        self._reference: SelfTest | None = None
        self._known_picture: Input = None
        self._picture_reference: SelfTest | None = None
        self._doubt: SelfTest | None = None  # the running self-test after a bad result; used by the finishing thread
        self._doubted_at = -_BAD_RESULT_PAUSE_S
        # Checked options: most calls have the same few.
        self._supported: dict[InferOptions, TokenizeOptions] = {}
        self._stalls: dict[InFlightLimit, Stall] = {}
        self._device = parts.model.backbone.device
        self._model_bytes = tensor_bytes(parts.model)
        self._close_model = parts.model.close
        activation = parts.info.activation or "identity"
        self._finisher = Finisher(
            self._deliver, self._mark_unhealthy, activation, self._on_bad_result, parts.info.max_input_length
        )
        self._queue = EntryQueue(parts.limits, token_s=self._finisher.least_token_s)
        self._core_load = _core_load(options)
        threads = CpuThreads(options.threads, options.threads)
        cache = ResultCache(options.cache_bytes) if options.cache_bytes else None
        own_runner, own_intake = _of_files() if parts.layout.reads_files else (Runner, Intake)
        self._runners = [
            own_runner(
                *(parts.model, self._queue, self._finisher, threads, parts.serial_tokens, self._core_load),
                lanes,
                self._on_defect,
                cache,
            )
            for lanes in ([(lane,) for lane in Lane] if parts.limits.own_threads else [tuple(Lane)])
        ]
        self._intake = own_intake(
            parts.tokenizer, self._queue, self._finisher, options.lane_limit_tokens, self._runners[0]
        )
        self._tokenizing = [
            self._thread("tokenizer", self._intake.run),
            self._thread("tokenizer-long", self._intake.run_long),
        ]
        names = ("engine", "engine-bulk")
        self._running = [self._thread(name, runner.run) for name, runner in zip(names, self._runners, strict=False)]
        self._finishing = self._thread("finisher", self._finisher.run)

    @classmethod
    def load(
        cls,
        options: EngineOptions,
        deliver: Callable[[list[Job]], None],
        on_fault: Callable[[str], None] = lambda reason: None,
    ) -> Engine:
        """Load and start a model; blocks until its first self-test has passed.

        `deliver` is called once per batch, by one thread at a time, with the jobs that the batch completed. `on_fault`
        is called once, on any thread, with the reason why the engine is unhealthy and must be replaced.

        Raises:
            ModelNotFound, InvalidConfig, ModelLoadFailed: another attempt would fail too.
            OutOfDeviceMemory: the model does not fit.
            DeviceFailed: the device, not the model, is at fault.
        """
        engine = cls(load_parts(options), options, deliver, on_fault)
        for thread in (*engine._tokenizing, *engine._running, engine._finishing):
            thread.start()
        try:
            if engine.layout.reads_texts:
                engine._reference = engine._run_self_test(_FIRST_SELF_TEST_S)
            engine._test_picture()
        except (Unavailable, DeadlineExceeded) as error:
            engine.close(grace_s=0.0)
            if engine._finisher.fault is not None:
                raise DeviceFailed(engine._finisher.fault) from error
            raise ModelLoadFailed(engine._fault or error.message) from error
        return engine

    def submit(self, job: Job, starts: bool = True) -> None:
        """Accept a job; never waits.

        Pass `starts=False` to submit more jobs at once and call `start` after the last one.

        Raises:
            WrongModelKind, InvalidInput: see `check`.
            Overloaded: too much waits in the job's lane.
            Unavailable: the engine is closing or broken.
        """
        if self._fault is not None:
            raise Unavailable(self._fault)
        options = self.check(job.options)
        info = self.info
        is_cut = info.most_dimensions > 0
        job.allocate_results(info.dimension, len(info.labels), is_cut=is_cut, is_rounded=self._is_rounded)
        self._intake.put(job, options, starts=starts)

    def start(self) -> None:
        """Start the jobs that were submitted with `starts=False`.

        If the engine is idle and the model takes at most a few milliseconds for a few queries, the calling thread
        computes and delivers them.
        """
        self._intake.start()

    def expected_s(self, lane: Lane, jobs: Sequence[Job] = (), share: Share = EQUAL) -> float | None:
        """Estimate the seconds until `jobs` are done, by recent throughput; 0 if nothing waits, None if it is unknown.

        It is unknown if the lane had no recent backlog.
        """
        if not self._queued_tokens(lane):
            return 0.0
        if (rate := self._queue.tokens_per_s(lane)) is None:
            return None
        return (self._tokens_before(lane, share) + self._finisher.running_tokens + self._estimate(jobs)) / rate

    def queued_tokens(self, lane: Lane, jobs: Sequence[Job], share: Share = EQUAL) -> tuple[int, int]:
        """Return the tokens that wait in `lane` before a call of `share`, and those of `jobs`; estimated for jobs that
        are not yet tokenized.
        """
        return self._tokens_before(lane, share), self._estimate(jobs)

    def _tokens_before(self, lane: Lane, share: Share) -> int:
        return self._queue.tokens_before(lane, share) + self._intake.waiting_before(lane, share)

    def _queued_tokens(self, lane: Lane) -> int:
        return self._queue.tokens(lane) + self._intake.waiting(lane)

    def _estimate(self, jobs: Sequence[Job]) -> int:
        return sum([self._intake.estimate(job, self.prompts.tokenize_options(job.options)) for job in jobs])

    def check(self, options: InferOptions) -> TokenizeOptions:
        """Check that the model supports `options`, and return how to tokenize with them.

        Raises:
            WrongModelKind: it lacks an output, or cannot normalise it.
            InvalidInput: bad `dimensions` or `prompt_name`.
        """
        if (known := self._supported.get(options)) is not None:
            return known
        check_supported(self.info, options)
        self.prompts.text(options.prompt_name)
        found = self.prompts.tokenize_options(options)
        if len(self._supported) < _MAX_OPTIONS and options.prompt is None:
            self._supported[options] = found
        return found

    def picture(self, data: bytes) -> Picture:
        """Make an input from an image file by reading its header; engine threads decode it later.

        Raises:
            WrongModelKind: the model takes no image.
            InvalidInput: its format is not allowed, its beginning is broken, or it is too large.
        """
        if self.layout.dual is None:
            raise WrongModelKind(f"Backend error: the model {shown_id(self.info.model_id)} takes no image")
        from teimgr.engine.images.inputs import PictureTokenizer

        assert isinstance(self.tokenizer, PictureTokenizer)
        return self.tokenizer.picture(data)

    def sound(self, data: bytes) -> Sound:
        """Make an input from a sound file by reading its header; engine threads decode it later.

        Raises:
            WrongModelKind: the model embeds no sounds.
            InvalidInput: its format is not allowed, it is empty or too long, or its beginning is broken.
        """
        if self.layout.sound is None:
            raise WrongModelKind(f"Backend error: the model {shown_id(self.info.model_id)} takes no sound")
        from teimgr.engine.sounds.files import SoundTokenizer

        assert isinstance(self.tokenizer, SoundTokenizer)
        return self.tokenizer.sound(data)

    def tokenize(self, text: str, add_special_tokens: bool, prompt_name: str | None) -> list[TokenSpan]:
        """Like `tokenized`, in one call."""
        return completed(self.tokenized(text, add_special_tokens, prompt_name))

    def tokenized(self, text: str, add_special_tokens: bool, prompt_name: str | None) -> Steps[list[TokenSpan]]:
        """Tokenize prompt and text into all of their tokens, as a generator of short steps.

        Raises:
            EmptyInput, InvalidInput, TokenizerFailed
        """
        return self.tokenizer.tokenized(text, add_special_tokens, self.prompts.text(prompt_name))

    def answers(self, inputs: Sequence[Input], options: InferOptions, timeout_s: float) -> Job:
        """Compute these inputs and return the finished job, with the errors of its rows.

        Raises:
            DeadlineExceeded: no answer in time.
            Others: as `submit`.
        """
        job = AwaitedJob(inputs, options)
        self.submit(job)
        if not job.done.wait(timeout_s):
            job.cancel()
            raise DeadlineExceeded(f"the model gave no answer within {timeout_s:g} s")
        return job

    def self_test(self, timeout_s: float) -> None:
        """Check the model's results: a batch has just finished, or a fixed input gives the same result as at load.

        Raises:
            DeadlineExceeded: no answer in time.
            Unavailable: the result differs from that at load, or a fault was seen before.
        """
        recent = time.monotonic() - self._finisher.finished_at < _RECENT_BATCH_S
        if self._fault is None and self._doubt is None and recent:
            return
        if self._fault is None and self._reference is not None:
            self._compare(self._run_self_test(timeout_s))
        if self._fault is None and self._known_picture is not None:
            self._compare(self._run_self_test(timeout_s, self._known_picture))
        if self._fault is not None:
            raise Unavailable(self._fault)

    def detect_hang(self, passed_s: float) -> None:
        """Detect a forward that hangs. The event loop calls this at regular intervals and passes their length.

        It counts intervals rather than reading the clock, so time in which the whole process was stopped or got no
        processor does not count.
        """
        for in_flight in self._finisher.limits:
            stall = self._stalls.get(in_flight)
            if stall is None or not in_flight.tokens or in_flight.departures != stall.departures:
                self._stalls[in_flight] = Stall(in_flight.departures)
                continue
            stall.seconds += passed_s
            limit_s = self._finisher.forward_limit_s(in_flight.tokens, _HANG_FLOOR_S, _HANG_FACTOR)
            if stall.seconds > limit_s and self._fault is None:
                log.error("a forward hangs", extra={"tokens": in_flight.tokens, "stacks": thread_stacks()})
                self._mark_unhealthy(f"a forward of {in_flight.tokens} tokens has not ended within {limit_s:.3g} s")

    def set_threads(self, threads: CpuThreads) -> None:
        for runner in self._runners:
            runner.use_threads(threads)

    def stats(self) -> EngineStats:
        done, on_cuda = self._finisher.stats, gpu.is_gpu(self._device)
        waiting = {lane.value: self._queued_tokens(lane) for lane in Lane}
        return replace(
            done,
            queued_texts=len(self._queue),
            queued_tokens=sum(waiting.values()),
            running_tokens=self._finisher.running_tokens,
            busy_s=self._finisher.busy_s(),
            sampled_texts=sum(runner.repeats.sampled for runner in self._runners),
            repeated_texts=sum(runner.repeats.repeated for runner in self._runners),
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
        """Refuse new jobs, finish queued ones within `grace_s`, fail the rest, and stop the threads.

        Returns at most about 3 s after the grace period. A thread that hangs in the device is left behind.
        """
        deadline = time.monotonic() + grace_s
        self._intake.close()
        if not all(_joined(thread, deadline) for thread in self._tokenizing):
            self._intake.abandon()
        self._queue.close()
        if not all(_joined(thread, deadline) for thread in self._running):
            self._queue.abandon()
        for thread in (*self._tokenizing, *self._running):
            _joined(thread, deadline + _LAST_BATCH_S)
        last = max(deadline, time.monotonic()) + _LAST_ANSWERS_S
        error = Unavailable("the engine was closed")
        if rows := self._intake.drain(error) + failed_rows(self._queue.drain(), error):
            self._finisher.put(Failures(rows), last - time.monotonic())
        self._finisher.close(last - time.monotonic())
        if not _joined(self._finishing, last):
            self._finisher.abandon()
        self._close_model(max(0.0, last - time.monotonic()))
        if self._core_load is not None:
            self._core_load.close()

    def _thread(self, name: str, body: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=self._supervise, args=(body,), name=f"teimgr-{name}", daemon=True)

    def _supervise(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # of any type: an engine without this thread must be restarted
            self._on_defect(error)

    def _on_defect(self, error: BaseException) -> None:
        log.error("exception on the engine's thread %s", threading.current_thread().name, exc_info=error)
        self._mark_unhealthy(f"the engine has a defect: {error!r}")

    def _deliver(self, jobs: list[Job]) -> None:
        for job in jobs:
            if isinstance(job, AwaitedJob):
                if isinstance(job, SelfTest) and job is self._doubt:
                    self._doubt = None
                    self._compare(job)
                job.done.set()
        if others := [job for job in jobs if not isinstance(job, AwaitedJob)]:
            self._deliver_out(others)

    def _on_bad_result(self) -> None:
        """Run a self-test at once (finisher thread): a bad result fails only its own text, a failed self-test the
        engine.
        """
        now = time.monotonic()
        busy = self._doubt is not None or now - self._doubted_at < _BAD_RESULT_PAUSE_S
        known = None if self.layout.reads_texts else self._known_picture
        if busy or (self._reference or self._picture_reference) is None or self._fault is not None:
            return
        self._doubt, self._doubted_at = SelfTest(self.info, known), now
        try:
            self._intake.put(self._doubt, self.prompts.tokenize_options(self._doubt.options), bounded=False)
        except Unavailable:  # the engine is closing
            self._doubt = None

    def _compare(self, test: SelfTest) -> None:
        """Mark the engine unhealthy if a finished self-test gave another result."""
        failure, known = test.errors.get(0), "file" if test.has_picture else "text"
        reference = self._picture_reference if test.has_picture else self._reference
        if isinstance(failure, InferenceFailed):
            self._mark_unhealthy(f"the self-test failed: {failure.message}")
        elif failure is None and (reference is None or not test.agrees_with(reference)):
            self._mark_unhealthy(f"the result of the known {known} has changed since the model was loaded")

    def _mark_unhealthy(self, reason: str) -> None:
        if self._fault is None:
            log.error("the engine is unhealthy: %s", reason)
            self._fault = reason
            self._on_fault(reason)

    def _test_picture(self) -> None:
        """Run the first self-test with an image or a sound, for a model that embeds them."""
        if self.layout.reads_files:
            from teimgr.engine.images.inputs import FileTokenizer

            assert isinstance(self.tokenizer, FileTokenizer)
            self._known_picture = self.tokenizer.known_picture()
            self._picture_reference = self._run_self_test(_FIRST_SELF_TEST_S, self._known_picture)

    def _run_self_test(self, timeout_s: float, picture: Input = None) -> SelfTest:
        test = SelfTest(self.info, picture)
        self._intake.put(test, self.prompts.tokenize_options(test.options), bounded=False)
        if not test.done.wait(timeout_s):
            test.cancel()
            if self._fault is not None:
                raise Unavailable(self._fault)
            raise DeadlineExceeded(f"the device gave no answer within {timeout_s:g} s")
        if 0 in test.errors:
            raise Unavailable(test.errors[0].message)
        return test


@dataclass(slots=True)
class Stall:
    """Seconds without a finished batch, and the count of `departures` when they began."""

    departures: int
    seconds: float = 0.0


class AwaitedJob(Job):
    """A job that the engine submits to itself. It is not delivered to a caller; `done` is set when it is answered."""

    __slots__ = ("done",)

    def __init__(self, inputs: Sequence[Input], options: InferOptions) -> None:
        super().__init__(inputs, options, Lane.INTERACTIVE, tenant=OWN_TENANT)
        self.done = threading.Event()


class SelfTest(AwaitedJob):
    """A fixed input for the model's first output: a text, a pair or a `picture`."""

    __slots__ = ("_output", "has_picture")

    def __init__(self, info: LoadedModel, picture: Input = None) -> None:
        self.has_picture = picture is not None
        self._output = Output(info.outputs[0])
        options = InferOptions(frozenset({self._output}), normalize=info.kind != Kind.SPARSE, raw_scores=True)
        known: Input = Pair(*PROBE_TEXTS[1:3]) if info.kind == Kind.RERANKER else PROBE_TEXTS[1]
        super().__init__([known if picture is None else picture], options)
        self.allocate_results(info.dimension, len(info.labels), is_cut=info.most_dimensions > 0)

    def agrees_with(self, reference: SelfTest) -> bool:
        """True if both results are equal, up to the effect of a batch's shape."""
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


def thread_stacks() -> str:
    """Return the Python stacks of all threads as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [(names.get(ident, str(ident)), frame) for ident, frame in sys._current_frames().items()]
    return "\n".join(f"{name}:\n{''.join(traceback.format_stack(frame))}" for name, frame in parts)


def _of_files() -> tuple[type[Runner], type[Intake]]:
    from teimgr.engine.images.runner import PictureIntake, PictureRunner  # here: imports Pillow

    return PictureRunner, PictureIntake


def _core_load(options: EngineOptions) -> CoreLoad | None:
    """Return this worker's slot in the host's load file; None without a file, or if the slot cannot be made."""
    try:
        return CoreLoad(options.core_load) if options.core_load else None
    except OSError as error:
        log.warning("cannot use idle cores of other workers: %s", error)
        return None
