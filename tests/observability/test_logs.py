"""Log lines: JSON for programs, columns for people, and levels by logger."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import datetime

import pytest

from teimgr.errors import InvalidConfig
from teimgr.observability import logs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    yield
    logs.setup("info", "json", io.StringIO())
    root.setLevel(level)


@pytest.mark.clause("M3.1-log-level")
def test_an_event_is_one_json_object_with_its_facts() -> None:
    stream = io.StringIO()
    logs.setup("info", "json", stream)
    logging.getLogger("teimgr.x").info("worker %s", "ready", extra={"instance": "a", "load_s": 1.5})
    event = json.loads(stream.getvalue())
    assert datetime.fromisoformat(event.pop("ts")).utcoffset() is not None
    assert event == {"level": "info", "logger": "teimgr.x", "message": "worker ready", "instance": "a", "load_s": 1.5}


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
