"""Log lines: JSON for programs, columns for people, and levels by logger."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import pty
import re
import select
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from teimgr.errors import InvalidConfig
from teimgr.observability import logs
from teimgr.observability.log_files import pieces, read_lines
from teimgr.observability.logs import last_line, last_warning, open_log, shrink


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.clause("M3.1-log-level")
def test_an_event_is_one_json_object_with_its_facts() -> None:
    stream = io.StringIO()
    logs.setup("info", "json", stream)
    logging.getLogger("teimgr.x").info("worker %s", "ready", extra={"instance": "a", "load_s": 1.5})
    event = json.loads(stream.getvalue())
    assert datetime.fromisoformat(event.pop("ts")).utcoffset() is not None
    assert event == {"level": "info", "logger": "teimgr.x", "message": "worker ready", "instance": "a", "load_s": 1.5}


def test_a_reader_that_stops_holds_up_nobody_and_learns_what_is_missing() -> None:
    """`teimgr serve | less`, or a stalled log driver, stopped the daemon for ever."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 65536)
    with os.fdopen(reading, "rb"), os.fdopen(writing, "w") as stream:
        logs.setup("info", "json", stream)
        for number in range(50):
            logging.getLogger("teimgr.x").info("%d %s", number, "x" * 9000)

        kept = os.read(reading, 65536).splitlines()
        logging.getLogger("teimgr.x").info("read again")
        *cut, missing, last = os.read(reading, 65536).splitlines()

        whole = [json.loads(line)["message"][:2].strip() for line in kept if line.endswith(b"}")]
        assert whole == [str(number) for number in range(len(whole))]
        assert not cut or not kept[-1].endswith(b"}")
        count = 50 - len(whole)
        assert json.loads(missing)["message"].startswith(f"{count} events are missing here")
        assert json.loads(last)["message"] == "read again"
        logs.setup("info", "json", io.StringIO())


def test_a_terminal_that_nobody_reads_holds_up_nobody() -> None:
    """It has room for a part of a line, and a write of the rest blocks."""
    reading, writing = pty.openpty()
    with os.fdopen(reading, "rb", buffering=0) as terminal, os.fdopen(writing, "w") as stream:
        logs.setup("info", "json", stream)
        for number in range(200):
            logging.getLogger("teimgr.x").info("%d %s", number, "x" * 700)

        select.select([terminal], [], [], 20)
        while select.select([terminal], [], [], 0)[0]:
            os.read(reading, 65536)
        logging.getLogger("teimgr.x").info("read again")
        *_, missing, last = os.read(reading, 65536).splitlines()
        assert re.match(r"\d+ events are missing here", json.loads(missing)["message"])
        assert json.loads(last)["message"] == "read again"
        logs.setup("info", "json", io.StringIO())


def test_a_traceback_and_odd_characters_stay_in_one_json_line() -> None:
    stream = io.StringIO()
    logs.setup("info", "json", stream)
    try:
        raise ValueError("two\nlines \udcff")
    except ValueError:
        logging.getLogger("x").exception("bad\nthing")
    (line,) = stream.getvalue().splitlines()
    event = json.loads(line)
    assert event["message"] == "bad\nthing"
    assert event["exception"].startswith("Traceback")


@pytest.mark.clause("M3.1-log-level")
def test_pretty_lines_are_plain_where_nobody_sees_colours() -> None:
    stream = io.StringIO()
    logs.setup("info", "pretty", stream)
    logging.getLogger("teimgr.x").warning("forged\n12:00:00 error", extra={"instance": "a\x1b[31m"})
    (line,) = stream.getvalue().splitlines()
    assert "\x1b" not in line
    assert line.endswith("instance=a\\x1b[31m teimgr.x")


def test_pretty_lines_are_coloured_on_a_terminal() -> None:
    stream = Terminal()
    logs.setup("info", "pretty", stream)
    logging.getLogger("teimgr.x").error("broken")
    assert "\x1b[31merror" in stream.getvalue()


@pytest.mark.clause("M3.1-log-level")
def test_directives_set_levels_by_logger_and_a_new_setup_forgets_them() -> None:
    stream = io.StringIO()
    logs.setup("warn,teimgr.mux=debug", "json", stream)
    logging.getLogger("teimgr.mux.calls").debug("shown")
    logging.getLogger("teimgr.other").info("hidden")
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == ["shown"]
    logs.setup("warn", "json", stream)
    logging.getLogger("teimgr.mux.calls").debug("hidden now")
    assert len(stream.getvalue().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("info", {"": 20}),
        ("WARN", {"": 30}),
        ("warn, teimgr.mux = debug", {"": 30, "teimgr.mux": 10}),
        ("warn,tei_manager=debug,tei_manager::health=trace", {"": 30, "teimgr": 10, "teimgr.health": 10}),
        ("off", {"": 60}),
        ("", {}),
    ],
)
def test_directives_are_parsed(text: str, levels: dict[str, int]) -> None:
    assert logs.parse_levels(text) == levels


@pytest.mark.parametrize("text", ["loud", "info,teimgr=loud", "=", "teimgr"])
def test_an_unknown_level_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="known: trace, debug"):
        logs.parse_levels(text)


def test_on_a_full_disk_old_logs_make_room_and_the_log_is_emptied_in_any_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.log"
    path.write_text("newest")
    (tmp_path / "a.log.1").symlink_to("/dev/full")
    assert shrink(path, limit_bytes=3, keep=1)
    assert [(each.name, each.stat().st_size) for each in tmp_path.iterdir()] == [("a.log", 0)]

    for name in ("a.log", "a.log.1", "a.log.2"):
        (tmp_path / name).write_text(name)
    copied, is_full = logs._copied, True

    def copied_the_second_time(source: Path, target: Path) -> bool:
        nonlocal is_full
        is_full, was_full = False, is_full
        return not was_full and copied(source, target)

    monkeypatch.setattr(logs, "_copied", copied_the_second_time)
    assert shrink(path, limit_bytes=3, keep=3)
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {
        "a.log": "",
        "a.log.1": "a.log",
        "a.log.2": "a.log.1",
    }


def test_a_log_over_its_limit_is_rotated_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    for generation in range(5):
        descriptor = open_log(path, limit_bytes=3, keep=2)
        os.write(descriptor, f"generation {generation}\n".encode())
        os.close(descriptor)

    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.log", "a.log.1", "a.log.2"]
    assert [last_line(tmp_path / name) for name in ("a.log", "a.log.1", "a.log.2")] == [
        "generation 4",
        "generation 3",
        "generation 2",
    ]


def test_a_log_in_use_is_rotated_and_its_writer_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    descriptor = open_log(path, limit_bytes=3, keep=1)
    os.write(descriptor, b"before\n")

    assert shrink(path, limit_bytes=3, keep=1)
    os.write(descriptor, b"after\n")
    os.close(descriptor)

    assert (path.read_text(), (tmp_path / "a.log.1").read_text()) == ("after\n", "before\n")
    assert not shrink(path, limit_bytes=6, keep=1)


def test_replicas_that_share_a_log_lose_no_line_when_one_starts_anew(tmp_path: Path) -> None:
    path, said = tmp_path / "a.log", []
    sibling = open_log(path, limit_bytes=3, keep=2)
    for generation in range(4):
        line = f"sibling in generation {generation}"
        os.write(sibling, f"{line}\n".encode())
        said.append(line)
        os.close(open_log(path, limit_bytes=3, keep=2))  # another replica is started
        if generation == 1:
            assert list(read_lines(pieces(path), 0, 9)) == said
    os.write(sibling, b"at last\n")
    os.close(sibling)

    assert list(read_lines(pieces(path), 0, 9)) == [*said[-2:], "at last"]  # two old files are kept


def test_no_log_can_be_read_by_other_users(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("of an earlier version\n")
    path.chmod(0o644)
    for _ in range(2):
        os.close(open_log(path, limit_bytes=3, keep=3))
        path.write_text("more\n")

    assert {file.name: file.stat().st_mode & 0o007 for file in tmp_path.iterdir()} == {
        "a.log": 0,
        "a.log.1": 0,
        "a.log.2": 0,
    }


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("ValueError: no", "ValueError: no"),
        ('{"level": "info", "message": "worker ready"}', ""),
        ('{"level": "error", "message": "worker failed"}', "worker failed"),
        ("[1, 2]", "[1, 2]"),
        ("", ""),
    ],
)
def test_only_a_last_line_that_may_explain_an_end_is_a_complaint(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "a.log"
    path.write_text(f"something before\n{line}\n\n" if line else "")

    assert last_warning(path) == complaint
    assert last_warning(tmp_path / "absent") == ""


def test_a_fatal_error_of_python_is_told_with_its_place_and_not_by_the_end_of_its_dump(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.log"
    code = "import ctypes, faulthandler, numpy; faulthandler.enable(); ctypes.string_at(1)"
    with path.open("w") as log:
        subprocess.run([sys.executable, "-c", code], stderr=log, check=False)

    assert path.read_text().rstrip().splitlines()[-1].startswith("Extension modules: numpy")
    assert re.fullmatch(
        r"Fatal Python error: Segmentation fault, at .*ctypes/__init__\.py, line \d+", last_warning(path)
    )


def test_without_old_logs_to_keep_rotation_is_removal(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("before\n")

    assert shrink(path, limit_bytes=3, keep=0)
    assert [file.name for file in tmp_path.iterdir()] == ["a.log"]
