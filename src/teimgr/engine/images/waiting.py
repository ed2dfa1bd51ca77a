"""Decodes pictures on a few threads ahead of their batch, within two limits: pixels of files being decoded, and bytes
of decoded pictures that are not yet taken.

The thread that needs a picture before its turn decodes it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from teimgr.engine.images.files import MAX_PIXELS, decode
from teimgr.engine.images.pixels import Pixels, prepare
from teimgr.engine.job import MediaFile, Picture
from teimgr.engine.native_library import allow_wait
from teimgr.errors import InferenceFailed, TeimgrError
from teimgr.models.layout import DualEncoder

log = logging.getLogger(__name__)

MAX_THREADS = 4
AHEAD_BYTES = 64 * 2**20
_WAIT_S = 0.03  # longest pause per picture, while queries use the cores
_NICENESS = 6  # below the forward: pictures use cores that queries and batches leave idle


class WaitingPicture:
    """A picture that may still be decoded; `take` returns its pixels."""

    __slots__ = ("__weakref__", "_decoder", "_done", "_held_bytes", "_result", "_started", "picture")

    def __init__(self, picture: MediaFile, decoder: FileDecoder) -> None:
        self.picture = picture
        self._decoder = decoder
        self._started = False
        self._held_bytes = 0
        self._done = threading.Event()
        self._result: Any = None

    def take(self) -> Any:
        """Return the pixels, or the error; the calling thread decodes them if no thread has begun."""
        if not self._done.is_set() and self.claim():
            self._decoder.decode_now(self)
        self._done.wait()
        self._decoder.taken(self)
        assert self._result is not None
        return self._result

    def claim(self) -> bool:
        """True, once, for the caller that has to decode it."""
        with self._decoder.lock:
            was_started, self._started = self._started, True
        return not was_started

    def finish(self, result: Any, held_bytes: int) -> None:
        """Store the result; `held_bytes` count until it is taken or dropped."""
        self._result, self._held_bytes = result, held_bytes
        self._done.set()

    def release(self) -> int:
        """Stop holding its bytes, and return how many were held."""
        held, self._held_bytes = self._held_bytes, 0
        return held

    def __del__(self) -> None:
        if self._held_bytes:
            self._decoder.taken(self)


class FileDecoder:
    """Decodes files of one model, on `threads` threads and on threads that need a file at once. Thread-safe.

    Files being decoded have at most `most` in total, measured by `size_of`.
    """

    most: int

    def __init__(self, threads: int) -> None:
        self.lock = threading.RLock()  # reentrant: `__del__` may release a picture at any point
        self._changed = threading.Condition(self.lock)
        self._waiting: deque[weakref.ref[WaitingPicture]] = deque()
        self._in_flight = 0
        self._held_bytes = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name="teimgr-pictures", daemon=True)
            for _ in range(min(threads, MAX_THREADS))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Let the threads end after what they are decoding."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def size_of(self, file: Any) -> int:
        """Return how much a file counts while it is decoded."""
        raise NotImplementedError

    def prepared(self, file: Any) -> Any:
        """Return what the model reads of a file; raises InvalidInput if it is broken."""
        raise NotImplementedError

    def expect(self, pictures: Iterable[MediaFile]) -> list[WaitingPicture]:
        """Queue pictures to be decoded in this order, unless one is needed earlier."""
        expected = [WaitingPicture(picture, self) for picture in pictures]
        with self._changed:
            self._waiting.extend(map(weakref.ref, expected))
            self._changed.notify(len(expected))
        return expected

    def decode_now(self, waiting: WaitingPicture) -> None:
        """Decode a claimed picture on this thread, once there is room for its pixels."""
        size = self.size_of(waiting.picture)
        with self._changed:
            self._changed.wait_for(lambda: self._has_room(size))
            self._in_flight += size
        self._decode(waiting, size, is_ahead=False)

    def taken(self, waiting: WaitingPicture) -> None:
        """Note that a picture was taken or dropped."""
        with self._changed:
            self._held_bytes -= waiting.release()
            self._changed.notify_all()

    def _run(self) -> None:
        if sys.platform == "linux":
            with suppress(OSError):
                own = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + _NICENESS)
        while (found := self._next()) is not None:
            waiting, size = found
            allow_wait(_WAIT_S)
            self._decode(waiting, size, is_ahead=True)
            del waiting, found

    def _next(self) -> tuple[WaitingPicture, int] | None:
        """Claim the next picture that no thread has begun; waits for one and for room."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._waiting and self._held_bytes < AHEAD_BYTES))
                if self._closed:
                    return None
                waiting = self._waiting.popleft()()
                if waiting is None or not waiting.claim():
                    continue
                size = self.size_of(waiting.picture)
                self._changed.wait_for(lambda size=size: self._has_room(size))  # type: ignore[misc]
                self._in_flight += size
                return waiting, size

    def _has_room(self, size: int) -> bool:
        return not self._in_flight or self._in_flight + size <= self.most

    def _decode(self, waiting: WaitingPicture, size: int, *, is_ahead: bool) -> None:
        try:
            result = self._result(waiting.picture)
        finally:
            with self._changed:
                self._in_flight -= size
                self._changed.notify_all()
        held = 0
        if is_ahead and not isinstance(result, TeimgrError):
            held = result.nbytes
            with self._changed:
                self._held_bytes += held
        waiting.finish(result, held)

    def _result(self, picture: MediaFile) -> Any:
        try:
            return self.prepared(picture)
        except TeimgrError as error:
            return error
        except MemoryError:
            return InferenceFailed(f"No memory is left to decode a {picture.format} file of {picture.nbytes:,} bytes")
        except Exception as error:  # of any type: only this file fails
            log.exception("decoding a file failed")
            return InferenceFailed(f"Backend error: the file cannot be decoded: {type(error).__name__}")


class PictureDecoder(FileDecoder):
    """Decodes pictures."""

    most = MAX_PIXELS

    def __init__(self, dual: DualEncoder, threads: int) -> None:
        super().__init__(threads)
        self._dual = dual

    def size_of(self, file: Picture) -> int:
        """Return its number of pixels."""
        return file.width * file.height

    def prepared(self, file: Picture) -> Pixels:
        """Return its pixels after the model's own steps; raises InvalidInput."""
        return prepare(decode(file.data), self._dual.steps)
