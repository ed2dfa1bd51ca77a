"""Renders pages of PDF documents as PNG images, by pypdfium2 in one process per document.

PDFium is a large library that parses untrusted files. A document that crashes it, hangs it or takes too much memory
ends only that process, `python -P pdf_pages.py FIRST LAST`. It reads the document from standard input, and writes
frames with the number of pages and the images to standard output.
"""

from __future__ import annotations

import io
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from teimgr.errors import InvalidInput

DOTS_PER_INCH = 150
MAX_PIXELS = 5_000_000
"""Limit of one image, whose file then has at most 16 MB. Larger pages are rendered with fewer dots per inch."""
MAX_PAGES = 10_000
MAX_FILE_BYTES = 256 * 2**20
PAGE_S = 20.0
"""Limit of processor time and of elapsed time for a page, and for opening a document."""
IS_THERE = find_spec("pypdfium2") is not None
WAY_OUT = "PDF documents are read by pypdfium2, which is not installed: pip install 'teimgr[images]'"
_POINTS_PER_INCH = 72
_MEMORY_BYTES = 2 * 2**30  # limit of the address space; PDFium with a page takes some 300 MB
_MAX_OPEN_FILES = 64
_NICENESS = 6  # yields to the forward, like threads that decode images
_MAX_FAILURES = 3  # failed processes after which the rest of a document is skipped
_COMMAND = (sys.executable, "-P", __file__)
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME")  # no tokens
_COUNT, _IMAGE, _FAULT, _BROKEN = b"NIFB"  # kinds of frames
_HEAD_BYTES = 5  # the kind, and the length of the content
_MAX_FRAME_BYTES = 64 * 2**20  # an image has at most a quarter; a compromised process might send more
_COUNT_DIGITS, _SHOWN_BYTES = 9, 200
_BREAKS = "it breaks PDFium"
_PASSWORD = 4  # FPDF_ERR_PASSWORD

Source = bytes | Path


class _EndedError(Exception):
    """The process ended before it was done, or took too long."""


def page_count(source: Source) -> int:
    """Return the number of pages of a document, of which at most `MAX_PAGES` are read.

    Raises:
        InvalidInput: it is not a PDF, is broken, or has a password; or pypdfium2 is missing.
        OSError: the file cannot be read.
    """
    for kind, content in _opened(source, 1, 0):
        return _checked_count(kind, content)
    raise AssertionError("the process sent no frame and raised no error")


def pages(source: Source, first: int = 1) -> Iterator[bytes | InvalidInput]:
    """Yield PNG files of the pages from number `first` on, or why a page has none.

    Raises:
        InvalidInput, OSError: see `page_count`.
    """
    at, count, failures = first, None, 0
    while count is None or at <= count:
        try:
            for kind, content in _opened(source, at, MAX_PAGES):
                if kind in (_COUNT, _BROKEN):
                    count = _checked_count(kind, content)
                else:
                    yield _image_of(kind, content, at)
                    at += 1
            return
        except (_EndedError, InvalidInput) as error:
            if count is None:
                raise
            failures += 1
            yield _not_rendered(at, error)
            at += 1
        if failures == _MAX_FAILURES:
            yield from (_not_rendered(left, f"{failures} others have failed") for left in range(at, count + 1))
            return


def page(source: Source, number: int | None) -> bytes:
    """Return the PNG file of one page, by its number from 1 on; with None, of the only page.

    Raises:
        InvalidInput, OSError: see `page_count`; or the page does not exist, there are several, or rendering fails.
    """
    try:
        for kind, content in _opened(source, number or 1, number or 1):
            if kind not in (_COUNT, _BROKEN):
                found = _image_of(kind, content, number or 1)
                if isinstance(found, InvalidInput):
                    raise found
                return found
            count = _checked_count(kind, content)
            if number is None and count > 1:
                raise InvalidInput(
                    f"Input validation error: the PDF has {count:,} pages, and an input is one of them: give its "
                    "number as `page`"
                )
            if number is not None and number > count:
                raise InvalidInput(
                    f"Input validation error: the PDF has {count:,} page{'s' * (count > 1)}, and `page` is {number:,}"
                )
    except _EndedError as error:
        raise _not_rendered(number or 1, error) from error
    raise _not_rendered(number or 1, _BREAKS)


def _checked_count(kind: int, content: bytes) -> int:
    if kind == _BROKEN:
        raise InvalidInput(f"Input validation error: {_words(content)}")
    if not content.isdigit() or len(content) > _COUNT_DIGITS:
        raise InvalidInput("Input validation error: the PDF cannot be opened: " + _BREAKS)
    return int(content)


def _words(content: bytes) -> str:
    return content[:_SHOWN_BYTES].decode("utf-8", "replace")


def _image_of(kind: int, content: bytes, number: int) -> bytes | InvalidInput:
    if kind == _IMAGE:
        return content
    return _not_rendered(number, _words(content))


def _not_rendered(number: int, why: object) -> InvalidInput:
    return InvalidInput(f"Input validation error: page {number} of the PDF cannot be rendered: {why}")


def _opened(source: Source, first: int, last: int) -> Iterator[tuple[int, bytes]]:
    """Yield the frames of a process that reads a document; the first has the number of pages.

    Raises:
        InvalidInput: see `page_count`.
        _EndedError: the process has ended, or `PAGE_S` went by without a frame; before the first frame, InvalidInput.
    """
    if not IS_THERE:
        raise InvalidInput(f"Input validation error: {WAY_OUT}")
    size = len(source) if isinstance(source, bytes) else source.stat().st_size
    if size > MAX_FILE_BYTES:
        raise InvalidInput(
            f"Input validation error: the PDF has {size:,} bytes, and {MAX_FILE_BYTES:,} are allowed: divide it"
        )
    given: Any = subprocess.PIPE if isinstance(source, bytes) else source.open("rb")
    try:
        process = subprocess.Popen(
            [*_COMMAND, str(first), str(last)],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        )
    finally:
        if given is not subprocess.PIPE:
            given.close()
    with process:
        try:
            if isinstance(source, bytes):
                _give(process, source)
            try:
                yield _frame(process)
            except _EndedError as error:
                raise InvalidInput(f"Input validation error: the PDF cannot be opened: {error}") from error
            for _ in range(first, last + 1):
                if not (frame := _frame(process))[1]:
                    return
                yield frame
        finally:
            process.kill()


def _give(process: subprocess.Popen[bytes], source: bytes) -> None:
    """Write the document to the process; if that has ended, `_frame` raises."""
    assert process.stdin is not None
    timer = _timer(process)
    try:
        process.stdin.write(source)
        process.stdin.close()
    except BrokenPipeError:
        process.kill()
    finally:
        timer.cancel()


def _frame(process: subprocess.Popen[bytes]) -> tuple[int, bytes]:
    """Return the next frame; a frame without content is the last."""
    assert process.stdout is not None
    timer = _timer(process)
    try:
        head = process.stdout.read(_HEAD_BYTES)
        size = int.from_bytes(head[1:], "big")
        if size > _MAX_FRAME_BYTES:
            raise _EndedError(_BREAKS)
        content = process.stdout.read(size) if len(head) == _HEAD_BYTES else b""
    finally:
        timer.cancel()
    if len(head) < _HEAD_BYTES or len(content) < size:
        is_slow = process.wait() in (-signal.SIGKILL, -signal.SIGXCPU)
        raise _EndedError(
            f"it takes more than {PAGE_S:g} s" if is_slow else "it breaks PDFium, or takes too much memory"
        )
    return head[0], content


def _timer(process: subprocess.Popen[bytes]) -> threading.Timer:
    timer = threading.Timer(PAGE_S, process.kill)
    timer.daemon = True
    timer.start()
    return timer


# The process of a document runs what follows.


def _run(first: int, last: int) -> None:
    """Read the document from standard input and write frames: the number of pages, and pages `first` to `last`."""
    import resource  # here: Windows lacks it, and clients run there too

    for what, most in ((resource.RLIMIT_AS, _MEMORY_BYTES), (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES)):
        resource.setrlimit(what, (most, most))
    for what in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(what, (0, 0))
    os.nice(_NICENESS)
    _bound_processor()
    import pypdfium2

    out = sys.stdout.buffer
    try:
        document = pypdfium2.PdfDocument(sys.stdin.buffer.read(MAX_FILE_BYTES))
        document.init_forms()
        count = len(document)
    except pypdfium2.PdfiumError as error:
        has_password = error.err_code == _PASSWORD
        _say(out, _BROKEN, b"the PDF has a password" if has_password else b"the PDF is broken, or no PDF")
        return
    if not 1 <= count <= MAX_PAGES:
        _say(out, _BROKEN, f"the PDF has {count:,} pages, and 1 to {MAX_PAGES:,} are allowed".encode())
        return
    _say(out, _COUNT, str(count).encode())
    for number in range(first, min(last, count) + 1):
        _bound_processor()
        try:
            _say(out, _IMAGE, _rendered(document, number))
        except (pypdfium2.PdfiumError, MemoryError, ValueError) as error:
            _say(out, _FAULT, (str(error) or type(error).__name__).encode())
    _say(out, _COUNT, b"")


def _bound_processor() -> None:
    """Limit the processor time of the next page; the kernel enforces it even if the parent has been killed."""
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(used.ru_utime + used.ru_stime + PAGE_S)
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))


def _rendered(document: Any, number: int) -> bytes:
    own = document[number - 1]
    try:
        width, height = own.get_size()
        if not (width > 0 and height > 0):
            raise ValueError("it has no size")
        scale = DOTS_PER_INCH / _POINTS_PER_INCH
        scale = min(scale, math.sqrt(MAX_PIXELS / (width * height)))
        image = own.render(scale=scale, rev_byteorder=True, prefer_bgrx=True).to_pil().convert("RGB")
    finally:
        own.close()
    written = io.BytesIO()
    image.save(written, "PNG", compress_level=1)
    return written.getvalue()


def _say(out: IO[bytes], kind: int, content: bytes) -> None:
    out.write(bytes((kind,)) + len(content).to_bytes(_HEAD_BYTES - 1, "big") + content)
    out.flush()


if __name__ == "__main__":
    _run(int(sys.argv[1]), int(sys.argv[2]))
