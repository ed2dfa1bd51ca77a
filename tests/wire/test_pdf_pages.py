"""Pages of PDF documents: each as an image, and a document that harms the process that reads it fails alone."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from PIL import Image
from tests.support.models.dual_encoders import pdf_of

from teimgr.errors import InvalidInput
from teimgr.wire import pdf_pages

LEFT_RED = (595, 842, "1 0 0 rg 0 0 300 842 re f")
BLUE = (72, 36, "0 0 1 rg 0 0 72 36 re f")
HUGE = (7200, 3600, "0 1 0 rg 0 0 7200 3600 re f")
THREE = pdf_of(LEFT_RED, BLUE, HUGE)


def opened(png: bytes | InvalidInput) -> Image.Image:
    assert isinstance(png, bytes), png
    return Image.open(io.BytesIO(png))


def process_of(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Documents are read by this script."""
    monkeypatch.setattr(pdf_pages, "_COMMAND", (sys.executable, "-c", script))


def test_pages_are_images_of_150_dots_per_inch_and_large_ones_of_fewer(tmp_path: Path) -> None:
    (tmp_path / "three.pdf").write_bytes(THREE)
    assert pdf_pages.page_count(tmp_path / "three.pdf") == pdf_pages.page_count(THREE) == 3
    files = list(pdf_pages.pages(THREE))
    first, second, third = map(opened, files)
    assert first.size == (1240, 1755)
    assert [first.getpixel(at) for at in ((9, 9), (1200, 9))] == [(255, 0, 0), (255, 255, 255)]
    assert (second.size, second.getpixel((9, 9))) == ((150, 75), (0, 0, 255))
    assert third.size == (3163, 1582)
    assert list(pdf_pages.pages(tmp_path / "three.pdf", 2)) == files[1:]
    assert pdf_pages.page(THREE, 2) == files[1]
    assert pdf_pages.page(pdf_of(BLUE), None) == files[1]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (None, "the PDF has 3 pages, and an input is one of them: give its number as `page`"),
        (4, "the PDF has 3 pages, and `page` is 4"),
    ],
)
def test_a_page_is_named_and_there(number: int | None, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        pdf_pages.page(THREE, number)


_LOCKED = "/Encrypt << /Filter /Standard /V 1 /R 2 /O <{0}> /U <{0}> /P -4 >> /ID [<00> <00>]".format("00" * 32)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"hello", "broken, or no PDF"),
        (THREE[:300], "broken, or no PDF"),
        (pdf_of(BLUE, trailer=_LOCKED), "has a password"),
    ],
)
def test_what_cannot_be_read_says_why(data: bytes, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        pdf_pages.page_count(data)
    with pytest.raises(InvalidInput, match=said):
        list(pdf_pages.pages(data))


def test_a_document_of_too_many_pages_is_not_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    process_of(monkeypatch, "from teimgr.wire import pdf_pages as p; p.MAX_PAGES = 2; p._run(1, 2)")
    with pytest.raises(InvalidInput, match="has 3 pages, and 1 to 2 are allowed"):
        list(pdf_pages.pages(THREE))


def test_a_file_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    process_of(monkeypatch, "raise SystemExit")
    monkeypatch.setattr(pdf_pages, "MAX_FILE_BYTES", 100)
    with pytest.raises(InvalidInput, match="bytes, and 100 are allowed: divide it"):
        pdf_pages.page_count(THREE)


def test_without_pypdfium2_it_says_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf_pages, "IS_THERE", False)
    with pytest.raises(InvalidInput, match=r"pip install 'teimgr\[images\]'"):
        pdf_pages.page_count(THREE)


# Says that there are five pages, and renders all but number 2 and those from 4 on, at which it ends in its own way.
_FALLING = """
import os, signal, sys, time
def say(kind, content): sys.stdout.buffer.write(kind + len(content).to_bytes(4, "big") + content)
sys.stdin.buffer.read()
say(b"N", b"5")
for number in range(int(sys.argv[1]), 6):
    sys.stdout.flush()
    if number in (2, 4, 5): {end}
    say(b"I", b"%d" % number)
say(b"N", b"")
"""


@pytest.mark.parametrize(
    ("end", "said"),
    [("os.kill(os.getpid(), signal.SIGSEGV)", "it breaks PDFium"), ("time.sleep(60)", "it takes more than 0.5 s")],
)
def test_a_page_that_ends_or_stops_the_process_fails_alone(
    monkeypatch: pytest.MonkeyPatch, end: str, said: str
) -> None:
    process_of(monkeypatch, _FALLING.format(end=end))
    monkeypatch.setattr(pdf_pages, "PAGE_S", 0.5)
    found = list(pdf_pages.pages(THREE))
    assert [found[0], found[2]] == [b"1", b"3"]
    for number in (2, 4, 5):
        assert f"page {number} of the PDF cannot be rendered: {said}" in str(found[number - 1])
    with pytest.raises(InvalidInput, match=said):
        pdf_pages.page(THREE, 2)


def test_a_document_whose_pages_fail_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    process_of(monkeypatch, _FALLING.format(end="os._exit(1)").replace("(2, 4, 5)", "(1, 2, 3, 4, 5)"))
    found = list(pdf_pages.pages(THREE))
    assert len(found) == 5
    assert "3 others have failed" in str(found[3])


def test_a_process_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    process_of(monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr(pdf_pages, "PAGE_S", 0.3)
    with pytest.raises(InvalidInput, match=r"the PDF cannot be opened: it takes more than 0\.3 s"):
        list(pdf_pages.pages(b"%PDF" + bytes(2**20)))


def test_the_process_has_neither_tokens_nor_files_nor_memory_without_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    look = (
        "import os, resource as r; from teimgr.wire import pdf_pages as p; p._rendered = lambda *_: repr(("
        "[r.getrlimit(one)[0] for one in (r.RLIMIT_FSIZE, r.RLIMIT_AS, r.RLIMIT_NPROC)], os.environ.get('HF_TOKEN'),"
        " 0 < r.getrlimit(r.RLIMIT_CPU)[0] < 40)).encode(); p._run(1, 1)"
    )
    process_of(monkeypatch, look)
    assert pdf_pages.page(THREE, 1) == repr(([0, 2 * 2**30, 0], None, True)).encode()


@pytest.mark.parametrize(
    ("says", "said"),
    [
        ('b"N" + (2**31).to_bytes(4, "big")', "cannot be opened: it breaks PDFium"),
        ('b"N\\0\\0\\0\\1x"', "cannot be opened: it breaks PDFium"),
        ('b"B\\0\\0\\0\\1\\xff"', "Input validation error: \ufffd"),
        ('b"N\\0\\0\\0\\x011" + b"I" + (2**31).to_bytes(4, "big")', "page 1 .* it breaks PDFium"),
        ('b"N\\0\\0\\0\\x011" * 100_000', "page 1 .* it breaks PDFium"),
        ('b"N\\0\\0\\0\\x011F\\0\\0\\0\\1\\xff"', "page 1 .* rendered: \ufffd"),
    ],
    ids=["a long count", "no count", "no words", "a long image", "counts for ever", "a fault without words"],
)
def test_a_process_that_a_document_has_taken_over_gets_a_refusal_of_it_alone(
    monkeypatch: pytest.MonkeyPatch, says: str, said: str
) -> None:
    """It once had the worker allocate what it announced, or read for ever."""
    process_of(
        monkeypatch,
        f"import sys, time; sys.stdin.buffer.read(); sys.stdout.buffer.write({says}); sys.stdout.flush(); "
        "time.sleep(60)",
    )
    with pytest.raises(InvalidInput, match=said):
        pdf_pages.page(THREE, 1)
