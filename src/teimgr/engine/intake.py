"""Intake of jobs into the engine: tokenizes their rows into entries of the queue.

If nothing else waits, a few queries are tokenized on the calling thread, and computed there too if the model is fast
(`Intake.start`), which is faster than waking other threads.

Two threads tokenize everything else. The first tokenizes all waiting small jobs in one call of the library, and large
ones in chunks, so a query never waits for a whole file of texts. The second tokenizes long texts, in as many calls as
their cuts need (`engine/text/truncation.py`), so no other text waits for them. The finisher gets rows that cannot be
tokenized as failures.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from teimgr.engine.batching.batch import TokenizedTexts
from teimgr.engine.batching.fair_share import TenantTurns
from teimgr.engine.batching.queue import Charging, EntryQueue, QueueEntry
from teimgr.engine.finisher import Failures, Finisher
from teimgr.engine.job import Input, Job, Lane, Pair, Share, characters
from teimgr.engine.text.tokenizer import TextTokenizer, TokenizeOptions
from teimgr.errors import InvalidInput, Overloaded, TeimgrError, TokenizerFailed, Unavailable
from teimgr.wire.gil import short_turns
from teimgr.wire.text_column import TextColumn

log = logging.getLogger(__name__)

_CHUNK_TEXTS = 1024
_CHUNK_CHARS = 50_000  # some 10 ms on one core, 1 ms by the native tokenizer; a query may wait for one chunk
_BULK_TURN = 4  # while interactive jobs wait, every fourth chunk is from the bulk lane
# Longer texts are left to the thread for long texts: the library takes some 10 ms for this size, at worst 50.
_LONG_CHARS = 16_384
_LONG_TEXTS = 8  # tokenized together, from several jobs
# The most that is tokenized on a calling event loop: less than half a millisecond.
_AT_ONCE_TEXTS = 32
_AT_ONCE_CHARS = 2000
_LAST_QUERY_S = 0.1
_PROMPTED_PAIR = "Input validation error: `prompt_name` cannot be set with dual inputs"
_CHARS_PER_TOKEN = 3  # estimate before tokenization; few texts have shorter tokens


@dataclass(slots=True, eq=False)
class _Pending:
    """A job that is not fully tokenized: its next row, and the estimated tokens of the remaining rows."""

    job: Job
    options: TokenizeOptions
    estimate: int
    next_row: int = 0

    @property
    def share(self) -> Share:
        return self.job.share


@dataclass(slots=True)
class _Chunk:
    """Rows to tokenize together: the next range of rows of each job."""

    parts: list[tuple[_Pending, range]] = field(default_factory=list)
    empty: list[Job] = field(default_factory=list)
    texts: int = 0
    chars: int = 0

    @property
    def full(self) -> bool:
        return self.texts >= _CHUNK_TEXTS or self.chars >= _CHUNK_CHARS

    def take(self, pending: _Pending) -> None:
        """Add rows of a job until the job or the room ends, or a long text follows."""
        begin, job = pending.next_row, pending.job
        inputs = job.inputs
        end = limit = min(len(inputs), begin + _CHUNK_TEXTS - self.texts)
        if begin == 0 and end == len(inputs) and _are_short(job) and self.chars + job.chars < _CHUNK_CHARS:
            self.chars += job.chars
        elif isinstance(inputs, TextColumn):  # counts bytes
            bounds = inputs.offsets[begin : limit + 1]
            if len(long := np.flatnonzero(np.diff(bounds) > _LONG_CHARS)):
                limit = begin + int(long[0])
            end = min(limit, begin + int(np.searchsorted(bounds, bounds[0] + _CHUNK_CHARS - self.chars)))
            self.chars += int(inputs.offsets[end] - bounds[0])
        else:
            for row in range(begin, limit):
                if (count := characters(inputs[row])) > _LONG_CHARS:
                    end = row
                    break
                self.chars += count
                if self.chars >= _CHUNK_CHARS:
                    end = row + 1
                    break
        pending.next_row = end
        self.texts += end - begin
        if end > begin:
            self.parts.append((pending, range(begin, end)))


class QueryRunner(Protocol):
    """Interface of the runner that computes queries, on its own thread or the calling one."""

    def is_idle(self) -> bool:
        """True if nothing is computed and no query is in the queue."""

    def serve_queries(self, entries: list[QueueEntry]) -> bool:
        """Compute and deliver queries on the calling thread; False, with nothing done, if that is not allowed."""


class Intake:
    """Accepts jobs on any thread. `run` is the body of the tokenizer thread, until closed and empty, or abandoned;
    `run_long` is that of the thread for long texts.

    `limit_tokens` bounds each lane, to protect the engine: servers limit their callers before. A cancelled job counts
    until its turn. `queries` computes the queries that `start` tokenizes.
    """

    def __init__(
        self, tokenizer: TextTokenizer, queue: EntryQueue, finisher: Finisher, limit_tokens: int, queries: QueryRunner
    ) -> None:
        self._tokenizer = tokenizer
        self._queue = queue
        self._finisher = finisher
        self._limit = limit_tokens
        self._queries = queries
        lock = threading.RLock()
        self._changed, self._long_changed = threading.Condition(lock), threading.Condition(lock)
        self._charging = Charging(self._on_decided)
        self._has_accounts = False  # no job has been charged yet
        self._tokenizing = threading.Lock()  # held by the thread that tokenizes
        self._inbox: dict[Lane, TenantTurns[_Pending]] = {lane: TenantTurns() for lane in Lane}
        self._long: dict[Lane, dict[_Pending, deque[int]]] = {lane: {} for lane in Lane}  # rows, by job
        self._estimates = dict.fromkeys(Lane, 0)
        self._turn = self._long_turn = 0
        self._closed = False
        self._abandoned = False
        queue.fed_by(self)

    def put(self, job: Job, options: TokenizeOptions, bounded: bool = True, starts: bool = True) -> None:
        """Accept `job` without waiting. An empty lane accepts a job of any size.

        Pass `starts=False` to put more jobs at once and call `start` after the last one.

        Raises:
            Overloaded: too much waits in the job's lane.
            Unavailable: the engine is closing.
        """
        estimate = self.estimate(job, options)
        with self._changed:
            if self._closed:
                raise Unavailable("the engine is closing")
            held = self._estimates[job.lane] + self._queue.tokens(job.lane)
            if bounded and held and held + estimate > self._limit:
                raise Overloaded
            self._estimates[job.lane] += estimate
            if job.account is not None:
                self._has_accounts = True
            job.mark_submitted()
            self._inbox[job.lane].append(_Pending(job, options, estimate))
            if starts:
                self._changed.notify()

    def start(self) -> None:
        """Start the jobs that were put with `starts=False`.

        If the engine is idle, a few queries are tokenized on the calling thread; if the model is fast, they are also
        computed and delivered there.
        """
        with self._changed:
            if not (self._are_few_queries() and self._tokenizing.acquire(blocking=False)):
                self._changed.notify()
                return
            chunk = self._fill(self._inbox[Lane.INTERACTIVE])
        try:
            entries = self._tokenize_queries(chunk)
            if entries and not self._queries.serve_queries(entries):
                self._queue.put(entries)
        finally:
            self._tokenizing.release()

    def run(self) -> None:
        while self._tokenize_next():
            pass

    def run_long(self) -> None:
        while self._tokenize_next_long():
            pass

    def _tokenize_next(self) -> bool:
        """Wait for the next chunk, tokenize it and pass it on; False at the end.

        It is a separate call so that no variable keeps the previous jobs in memory while the thread waits.
        """
        if (chunk := self._next_chunk()) is None:
            return False
        with self._tokenizing:
            entries, failures = self._tokenize(chunk)
            if self._charging.has_decided:
                admitted, failed, refused = self._charging.take_decided()
                entries += _enqueued(admitted)
                failures += failed
                chunk.empty += refused
            self._pass_on(entries, failures, chunk.empty)
        self._count_tokenized(chunk.parts)
        return True

    def _tokenize_next_long(self) -> bool:
        """Tokenize the next long texts, like `_tokenize_next`."""
        if (chunk := self._next_long()) is None:
            return False
        with short_turns():
            entries, failures = self._tokenize(chunk)
        self._pass_on(entries, failures, chunk.empty)
        self._count_tokenized(chunk.parts)
        return True

    def _pass_on(
        self, entries: list[QueueEntry], failures: list[tuple[Job, int, TeimgrError]], empty: list[Job]
    ) -> None:
        if entries:
            self._queue.put(entries)
        if failures or empty:
            self._finisher.put(Failures(failures, empty))

    def _tokenize_queries(self, chunk: _Chunk) -> list[QueueEntry]:
        """Tokenize queries. Those that fail are left to the tokenizer thread, since the finisher may have to be waited
        for.
        """
        try:
            entries, failures = self._tokenize(chunk)
        except BaseException:  # a panic of the library must not end the caller's thread: another thread gets the rows
            self._put_back(chunk.parts)
            return []
        parts = chunk.parts
        if failures or chunk.empty:
            failed = {job for job, _, _ in failures}.union(chunk.empty)
            self._put_back([part for part in parts if part[0].job in failed])
            parts = [part for part in parts if part[0].job not in failed]
        self._count_tokenized(parts)
        return entries

    def _put_back(self, parts: Sequence[tuple[_Pending, range]]) -> None:
        with self._changed:
            for pending, rows in reversed(parts):
                pending.next_row = rows.start
                self._inbox[pending.job.lane].appendleft(pending)
            self._changed.notify()

    def _count_tokenized(self, parts: Iterable[tuple[_Pending, range]]) -> None:
        """Count rows by their tokens, in the queue, instead of by estimate."""
        with self._changed:
            for pending, rows in parts:
                tokenized = pending.estimate * len(rows) // (len(pending.job.inputs) - rows.start)
                pending.estimate -= tokenized
                self._estimates[pending.job.lane] -= tokenized

    def _are_few_queries(self) -> bool:
        """True if only queries wait, and few enough for an event loop to tokenize."""
        waiting = self._inbox[Lane.INTERACTIVE]
        if self._inbox[Lane.BULK] or not 0 < len(waiting) <= _AT_ONCE_TEXTS:
            return False
        chars = 0
        for each in waiting:
            job = each.job
            if len(job.inputs) != 1 or job.refused is not None:
                return False
            chars += job.chars + len(each.options.prompt)
        return chars <= _AT_ONCE_CHARS and self._queries.is_idle()

    def estimate(self, job: Job, options: TokenizeOptions) -> int:
        """Estimate the tokens of a job before it is tokenized."""
        texts = len(job.inputs)
        chars = job.chars + texts * len(options.prompt)
        return min(chars // _CHARS_PER_TOKEN, texts * self._tokenizer.max_length) + texts

    def waiting(self, lane: Lane) -> int:
        """Return the estimated tokens of the rows in `lane` that are not yet tokenized."""
        return self._estimates[lane]

    def waiting_before(self, lane: Lane, share: Share) -> int:
        """Return the part of `waiting` whose turn comes before that of a further job of a tenant."""
        with self._changed:
            return int(self._estimates[lane] * self._inbox[lane].part_before(share.tenant))

    def close(self) -> None:
        """Refuse new jobs; accepted ones are still tokenized."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            self._long_changed.notify()
        if self._tokenizing.acquire(timeout=_LAST_QUERY_S):  # a query being tokenized is then queued
            self._tokenizing.release()

    def abandon(self) -> None:
        with self._changed:
            self._closed = self._abandoned = True
            self._changed.notify()
            self._long_changed.notify()

    def drain(self, error: TeimgrError) -> list[tuple[Job, int, TeimgrError]]:
        """Remove the rows that were never tokenized, and return them as failures with `error`."""
        with self._changed:
            left = [(p, range(p.next_row, len(p.job.inputs))) for lane in Lane for p in self._inbox[lane]]
            long = [item for lane in Lane for item in self._long[lane].items()]
            for lane in Lane:
                self._inbox[lane].clear()
                self._long[lane].clear()
            held = self._charging.drain(error)
            return [*held, *((pending.job, row, error) for pending, rows in (*left, *long) for row in rows)]

    def _next_chunk(self) -> _Chunk | None:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._abandoned
                    or self._charging.has_decided
                    or self._ready()
                    or (self._closed and self._is_empty())
                )
            )
            ready = self._ready()
            if self._abandoned or not ready:
                return _Chunk() if self._charging.has_decided and not self._abandoned else None
            return self._fill(self._inbox[self._next_lane(ready)])

    def _next_long(self) -> _Chunk | None:
        """Return long texts to tokenize together: one per job in turn, so that none waits for all of another job."""
        with self._long_changed:
            self._long_changed.wait_for(
                lambda: (
                    self._abandoned
                    or self._ready_long()
                    or (self._closed and self._is_empty() and not self._has_long())
                )
            )
            ready = self._ready_long()
            if self._abandoned or not ready:
                return None
            self._long_turn = (self._long_turn + 1) % len(Lane)
            jobs = self._long[ready[self._long_turn % len(ready)]]
            chunk = _Chunk()
            while jobs and len(chunk.parts) < _LONG_TEXTS:
                pending, rows = next(iter(jobs.items()))
                del jobs[pending]
                if pending.job.cancelled:
                    self._estimates[pending.job.lane] -= pending.estimate
                    pending.estimate = 0
                    self._charging.forget(pending.job)
                    continue
                row = rows.popleft()
                chunk.parts.append((pending, range(row, row + 1)))
                if rows:
                    jobs[pending] = rows
            return chunk

    def _has_long(self) -> bool:
        return any(self._long.values())

    def _ready_long(self) -> list[Lane]:
        return [lane for lane in Lane if self._long[lane] and self._queue.has_room(lane)]

    def _is_empty(self) -> bool:
        return not any(self._inbox.values())

    def _ready(self) -> list[Lane]:
        """Return the lanes with jobs to tokenize; a lane waits while the queue has enough of its texts."""
        return [lane for lane in Lane if self._inbox[lane] and self._queue.has_room(lane)]

    def _next_lane(self, ready: list[Lane]) -> Lane:
        if len(ready) == 1:
            return ready[0]
        self._turn = (self._turn + 1) % _BULK_TURN
        return Lane.BULK if self._turn == 0 else Lane.INTERACTIVE

    def _on_decided(self) -> None:
        with self._changed:
            self._changed.notify()

    def room_was_made(self) -> None:
        """Note that entries have left the queue."""
        with self._changed:
            self._changed.notify()
            if self._has_long():
                self._long_changed.notify()

    def _fill(self, inbox: TenantTurns[_Pending]) -> _Chunk:
        """Take rows from the front of `inbox`; a job that does not fit into this chunk goes to the back."""
        chunk = _Chunk()
        while inbox and not chunk.full:
            pending = inbox.popleft()
            texts = pending.job.inputs
            if pending.job.cancelled:
                self._estimates[pending.job.lane] -= pending.estimate
                self._charging.forget(pending.job)
                continue
            if pending.job.refused is not None:  # `start` refused it
                self._estimates[pending.job.lane] -= pending.estimate
                chunk.empty.append(pending.job)
                continue
            if not texts:
                chunk.empty.append(pending.job)
                continue
            if not _are_short(pending.job):
                self._set_long_aside(pending)
            if pending.next_row < len(texts):
                chunk.take(pending)
            if pending.next_row < len(texts):
                inbox.append(pending)
        if self._closed and self._is_empty():
            self._long_changed.notify()  # no more long texts will arrive: their thread ends after the last one
        return chunk

    def _set_long_aside(self, pending: _Pending) -> None:
        """Move the long texts at the front of a job's remaining rows to their own thread."""
        inputs, row = pending.job.inputs, pending.next_row
        while row < len(inputs) and _length(inputs, row) > _LONG_CHARS:
            row += 1
        if row > pending.next_row:
            rows = self._long[pending.job.lane].setdefault(pending, deque())
            rows.extend(range(pending.next_row, row))
            pending.next_row = row
            self._long_changed.notify()

    def _tokenize(self, chunk: _Chunk) -> tuple[list[QueueEntry], list[tuple[Job, int, TeimgrError]]]:
        """Return the entries of a chunk, and the rows that cannot be tokenized; refused jobs are among these."""
        entries: list[QueueEntry] = []
        failures: list[tuple[Job, int, TeimgrError]] = []
        groups: dict[TokenizeOptions, list[tuple[Job, range]]] = {}
        for pending, rows in chunk.parts:
            groups.setdefault(pending.options, []).append((pending.job, rows))
        for options, parts in groups.items():
            for together in _tokenized_together(parts):
                tokenized = self._tokenized(_inputs_of(together), options)
                begin = 0
                for job, rows in together:
                    if job.options.prompt_name is not None:
                        _refuse_pairs(job, rows, tokenized, begin)
                    for places, result in tokenized.by_length(begin, begin + len(rows)):
                        if isinstance(result, TeimgrError):
                            failures.append((job, rows[int(places[0])], result))
                        else:
                            entries.append(QueueEntry(job, places + rows.start if rows.start else places, result))
                    begin += len(rows)
        if self._has_accounts:
            jobs = [pending.job for pending, _ in chunk.parts]
            entries, failures, refused = self._charging.admit(jobs, entries, failures)
            chunk.empty.extend(refused)
        return _enqueued(entries), failures

    def _tokenized(self, inputs: Sequence[Input], options: TokenizeOptions) -> TokenizedTexts:
        """Tokenize like `TextTokenizer.encode_all`; if that raises, only the inputs at fault fail."""
        try:
            return self._tokenizer.encode_all(inputs, options)
        except Exception as error:
            if len(inputs) > 1:
                return TokenizedTexts.of([self._tokenized([item], options)[0] for item in inputs])
            log.exception("tokenizing an input failed")
            return TokenizedTexts.of([TokenizerFailed(f"tokenizer error {error}")])


def _enqueued(entries: list[QueueEntry]) -> list[QueueEntry]:
    now = time.monotonic_ns()
    for entry in entries:
        entry.mark_enqueued(now)
    return entries


def _are_short(job: Job) -> bool:
    """True if no text is long, as far as that is known without looking at each."""
    return job.chars <= _LONG_CHARS and type(job.inputs) is list


def _length(inputs: Sequence[Input], row: int) -> int:
    """Return the characters of an input, or its bytes if they are known without decoding it."""
    if isinstance(inputs, TextColumn):
        return int(inputs.offsets[row + 1] - inputs.offsets[row])
    return characters(inputs[row])


_Parts = Sequence[tuple[Job, range]]


def _tokenized_together(parts: _Parts) -> Iterator[_Parts]:
    """Split the rows into parts that one call of the tokenizer takes; a column of texts is a separate part."""
    if lists := [part for part in parts if not isinstance(part[0].inputs, TextColumn)]:
        yield lists
    if len(lists) < len(parts):
        yield from ([part] for part in parts if isinstance(part[0].inputs, TextColumn))


def _inputs_of(parts: _Parts) -> Sequence[Input]:
    if len(parts) == 1:
        ((job, rows),) = parts
        return job.inputs[rows.start : rows.stop]
    return [item for job, rows in parts for item in job.inputs[rows.start : rows.stop]]


def _refuse_pairs(job: Job, rows: range, tokenized: TokenizedTexts, begin: int) -> None:
    """Fail the pairs among the `rows` of a job with a prompt. Their first row is input `begin` of `tokenized`."""
    if isinstance(job.inputs, TextColumn):
        return
    for place, row in enumerate(rows, begin):
        if isinstance(job.inputs[row], Pair):
            tokenized.put(place, InvalidInput(_PROMPTED_PAIR))
