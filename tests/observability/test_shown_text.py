"""What callers may put into names, reasons and log lines cannot steer the operator's terminal."""

from __future__ import annotations

import json

import pytest

from teimgr.cli.output import print_table, say
from teimgr.cli.watch_commands import pretty_line
from teimgr.observability.logs import pretty
from teimgr.observability.shown_text import has_controls, one_line, several_lines

# Title and clipboard, cursor, a C1 introducer, a carriage return, overrides of direction, a line separator, backspace.
ATTACKS = (
    "\x1b]0;own\x07",
    "\x1b[2J",
    "\x9b2J",
    "ok\rfailed",
    "a\u202eb",
    "a\u2066b",
    "a\u2028b",
    "a\x08b",
    "\x7f",
    "\ud800",
)


@pytest.mark.parametrize("text", ATTACKS)
def test_controls_are_shown_and_not_obeyed(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = json.dumps({"ts": "2026-11-25T12:00:00Z", "level": text, "message": text, "logger": text, "x": text})
    broken = json.dumps({"ts": "2026-11-25T12:00:00Z", "level": "error", "message": "m", "exception": f"t\n{text}"})
    say(f"reason: {text}")
    for on_terminal in (False, True):
        print_table(("name", "reason"), [(text, text)], on_terminal=on_terminal)
    shown = (capsys.readouterr().out, pretty(line), pretty(text), pretty(broken), pretty_line(line), pretty_line(text))
    for each in (*shown, pretty_line(broken), one_line(text), several_lines(text)):
        assert not has_controls(each, "\n\t"), repr(each)
        assert "\\" in each or each.startswith("2026"), repr(each)


def test_plain_text_of_any_language_stays_as_it_is() -> None:
    for text in ("bge-small/en v1.5", "Größe – „ok“", "模型", "नमस्ते", "עברית", "🙂"):
        assert one_line(text) == several_lines(text) == text
    assert several_lines("a\n\tb") == "a\n\tb"
    assert one_line("a\n\tb") == "a\\n\tb"
