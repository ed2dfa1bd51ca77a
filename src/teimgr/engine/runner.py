"""The engine thread: take the next batch, pack it, start it on the device, hand it on."""

from __future__ import annotations

import ctypes
import logging
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from teimgr.engine.batch import pack
from teimgr.engine.finisher import Failures, Finisher, Output
from teimgr.engine.model import Model
from teimgr.engine.queue import EntryQueue
from teimgr.engine.shelf import Entry
from teimgr.errors import DeadlineExceeded, InferenceFailed, OutOfDeviceMemory, TeimgrError

log = logging.getLogger(__name__)

_IDLE_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class _Fault:
    """Why a batch did not start; `trace` only where it held a single text."""

    text: str
    memory: bool
    trace: str


class Runner:
    """Serves the queue with one embedder until the queue is closed and empty; `run` is the thread's body."""

    def __init__(self, embedder: Model, queue: EntryQueue, finisher: Finisher, threads: int) -> None:
        self._embedder = embedder
        self._queue = queue
        self._finisher = finisher
        self._threads_wanted: int | None = threads
        self._memory_returned = True
        self._flight = finisher.flight

    @property
    def running_tokens(self) -> int:
        """Tokens of the batches that were started and are not finished."""
        return self._flight.tokens

    def use_threads(self, threads: int) -> None:
        """Use that many CPU threads from the next batch on. OpenMP keeps the number per thread, so `run` sets it."""
        self._threads_wanted = threads

    def run(self) -> None:
        """Until the queue ends, or nobody finishes batches any more."""
        while self._flight.wait_for_room() and (take := self._queue.next_batch(_IDLE_WAIT_S)) is not None:
            if self._threads_wanted is not None:
                torch.set_num_threads(self._threads_wanted)
                self._threads_wanted = None
            if take.expired:
                self.fail(take.expired, DeadlineExceeded())
            if take.entries:
                self._execute(take.entries)
                self._memory_returned = False
            elif not self._memory_returned:
                return_freed_memory()
                self._memory_returned = True

    def fail(self, entries: Sequence[Entry], error: TeimgrError) -> None:
        """Give up on `entries`."""
        self._finisher.put(Failures([(entry.job, entry.row, error) for entry in entries]))

    def _execute(self, entries: list[Entry]) -> None:
        """Run a batch. One that fails is run again in halves, so only the texts that cannot be served fail."""
        fault = self._start(entries)
        if fault is None:
            return
        if fault.memory and self._embedder.transformer.device.type == "cuda":
            torch.cuda.empty_cache()
        if len(entries) > 1:
            log.warning("a batch of %d texts failed and is run in halves: %s", len(entries), fault.text)
            middle = len(entries) // 2
            for half in (entries[:middle], entries[middle:]):
                if self._flight.wait_for_room():
                    self._execute(half)
        elif fault.memory:
            self.fail(entries, OutOfDeviceMemory(f"A text of {entries[0].length} tokens does not fit the device"))
        else:
            log.error("a text failed by itself: %s", fault.trace)
            self.fail(entries, InferenceFailed(f"Backend error: {fault.text}"))

    def _start(self, entries: list[Entry]) -> _Fault | None:
        """Start a batch and hand it on.

        A fault comes back as text: the error itself would keep the tensors of the forward alive through its frames.
        """
        tokens = sum(entry.length for entry in entries)
        self._flight.enter(tokens)
        started_ns = time.monotonic_ns()
        try:
            batch = pack([e.ids for e in entries], [e.prompt_tokens for e in entries])
            vectors = self._embedder.embed(batch)
            output = Output([entries[i] for i in batch.order], _to_host(vectors), started_ns, tokens)
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:
            self._flight.leave(tokens)
            trace = "".join(traceback.format_exception(error)) if len(entries) == 1 else ""
            return _Fault(str(error), _is_out_of_memory(error), trace)
        self._finisher.put(output)
        return None


def return_freed_memory() -> None:
    """What was freed goes back to the system; glibc alone would keep all that the largest batch ever needed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


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
