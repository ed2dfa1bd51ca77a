"""The engine thread: take the next batch, pack it, start it on the device, hand it on."""

from __future__ import annotations

import ctypes
import logging
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from teimgr.engine.batch import pack
from teimgr.engine.finisher import Failures, Finisher, HostRows, StartedBatch
from teimgr.engine.heads import Rows
from teimgr.engine.job import Output
from teimgr.engine.model import Model
from teimgr.engine.queue import EntryQueue, QueueEntry
from teimgr.errors import DeadlineExceeded, InferenceFailed, OutOfDeviceMemory, TeimgrError

log = logging.getLogger(__name__)

_IDLE_WAIT_S = 1.0
# Of a batch's results on the host, at most. Vectors of texts are far below it; those of tokens, and the whole
# vocabularies of sparse models, would not be. Four batches may exist at a time: two in flight, two with the finisher.
_MOST_RESULT_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class _Fault:
    """Why a batch did not start; `trace` only where it held a single text."""

    text: str
    memory: bool
    trace: str


class Runner:
    """Serves the queue with one model until the queue is closed and empty; `run` is the thread's body."""

    def __init__(self, model: Model, queue: EntryQueue, finisher: Finisher, threads: int) -> None:
        self._model = model
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

    def fail(self, entries: Sequence[QueueEntry], error: TeimgrError) -> None:
        """Give up on `entries`."""
        self._finisher.put(Failures([(entry.job, entry.row, error) for entry in entries]))

    def _execute(self, entries: list[QueueEntry]) -> None:
        """Run a batch. One whose results would be too many bytes is run in halves.

        So is one that fails, so that only the texts that cannot be served fail.
        """
        if len(entries) > 1 and self._result_bytes(entries) > _MOST_RESULT_BYTES:
            self._execute_halves(entries)
            return
        fault = self._start(entries)
        if fault is None:
            return
        if fault.memory and self._model.backbone.device.type == "cuda":
            torch.cuda.empty_cache()
        if len(entries) > 1:
            log.warning("a batch of %d texts failed and is run in halves: %s", len(entries), fault.text)
            self._execute_halves(entries)
        elif fault.memory:
            self.fail(entries, OutOfDeviceMemory(f"A text of {entries[0].length} tokens does not fit the device"))
        else:
            log.error("a text failed by itself: %s", fault.trace)
            self.fail(entries, InferenceFailed(f"Backend error: {fault.text}"))

    def _execute_halves(self, entries: list[QueueEntry]) -> None:
        middle = len(entries) // 2
        for half in (entries[:middle], entries[middle:]):
            if self._flight.wait_for_room():
                self._execute(half)

    def _result_bytes(self, entries: Sequence[QueueEntry]) -> int:
        """Float32 results of all the texts for every output that one of them wants; sparse ones are few bytes."""
        widths, wanted = self._model.widths, _wanted(entries)
        tokens = sum(entry.length for entry in entries)
        per_token = sum(widths[output] for output in wanted & _PER_TOKEN)
        per_text = sum(widths[output] for output in wanted & _PER_TEXT)
        return 4 * (tokens * per_token + len(entries) * per_text)

    def _start(self, entries: list[QueueEntry]) -> _Fault | None:
        """Start a batch and hand it on.

        A fault comes back as text: the error itself would keep the tensors of the forward alive through its frames.
        """
        tokens = sum(entry.length for entry in entries)
        self._flight.enter(tokens)
        started_ns = time.monotonic_ns()
        try:
            batch = pack([entry.encoded for entry in entries])
            rows = self._model.run(batch, _wanted(entries))
            started = StartedBatch([entries[i] for i in batch.order], _to_host(rows), started_ns, tokens)
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:
            self._flight.leave(tokens)
            trace = "".join(traceback.format_exception(error)) if len(entries) == 1 else ""
            return _Fault(str(error), _is_out_of_memory(error), trace)
        self._finisher.put(started)
        return None


def return_freed_memory() -> None:
    """What was freed goes back to the system; glibc alone would keep all that the largest batch ever needed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


_PER_TOKEN = frozenset({Output.TOKENS, Output.MULTI_VECTOR})
_PER_TEXT = frozenset({Output.DENSE, Output.SCORES})


def _wanted(entries: Sequence[QueueEntry]) -> frozenset[Output]:
    return frozenset().union(*{entry.job.options.outputs for entry in entries})


def _to_host(rows: Mapping[Output, Rows]) -> Callable[[], dict[Output, HostRows]]:
    """Start the copies of `rows` to the host; the result waits for them."""
    here = {
        output: [None if part is None else _copied(part) for part in (of.values, of.offsets, of.indices)]
        for output, of in rows.items()
    }
    copied = None
    if any(of.values.device.type == "cuda" for of in rows.values()):
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()

    def wait() -> dict[Output, HostRows]:
        if copied is not None:
            copied.synchronize()
        return {output: _host_rows(*parts) for output, parts in here.items()}

    return wait


def _copied(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _host_rows(values: Tensor | None, offsets: Tensor | None, indices: Tensor | None) -> HostRows:
    assert values is not None
    return HostRows(
        values.float().numpy(),
        None if offsets is None else offsets.numpy(),
        None if indices is None else indices.numpy(),
    )


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
