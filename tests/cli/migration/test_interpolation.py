"""Variables of compose files, and files of variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from teimgr.cli.migration.interpolation import MAX_DEPTH, MAX_ENV_FILE_BYTES, Interpolation, read_env_file
from teimgr.errors import InvalidConfig

VALUES = {"A": "a", "EMPTY": "", "B_2": "b"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x $A ${B_2}y", "x a by"),
        ("$$A $$", "$A $"),
        ("${EMPTY:-d}|${EMPTY-d}|${NONE:-d}|${NONE-d}", "d||d|d"),
        ("${NONE:-${OTHER:-$A}}", "a"),
        ("${A:+yes}|${EMPTY:+yes}|${EMPTY+yes}|${NONE+yes}", "yes||yes|"),
        ("${A:?must}", "a"),
        ("${NONE:-}", ""),
        ("no variable", "no variable"),
    ],
)
def test_variables_have_their_values_or_defaults(text: str, value: str) -> None:
    assert Interpolation(VALUES)(text, "here") == value


def test_variables_without_a_value_are_named() -> None:
    interpolated = Interpolation(VALUES)

    assert interpolated("$NONE ${OTHER} ${THIRD:-x}", "here") == "  x"
    assert interpolated.unset == {"NONE", "OTHER"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("${NONE:?x}", "here: the variable NONE has to be set"),
        ("${EMPTY?x} ${NONE?x}", "here: the variable NONE has to be set"),
        ("a $ b", "here: a single \\$"),
        ("${A", "without its closing"),
        ("${A!x}", "that is not a variable"),
        ("${:-x}", "that is not a variable"),
        ("${X:-" * (MAX_DEPTH + 2) + "}" * (MAX_DEPTH + 2), f"more than {MAX_DEPTH} variables"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_place(text: str, why: str) -> None:
    with pytest.raises(InvalidConfig, match=why):
        Interpolation(VALUES)(text, "here")


def test_the_result_is_bounded() -> None:
    with pytest.raises(InvalidConfig, match="longer than"):
        Interpolation({"A": "x" * 1000})("$A" * 100, "here")


def test_a_file_of_variables(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text(
        "# comment\n\nA=plain # behind\nexport B = \"two words\"\nC='$A literal'\n"
        "D=${A}-${HOME_OF}\nE=\nHOME_OF\nGONE\n"
    )

    assert read_env_file(file, {"HOME_OF": "h"}) == {
        "A": "plain",
        "B": "two words",
        "C": "$A literal",
        "D": "plain-h",
        "E": "",
        "HOME_OF": "h",
    }


def test_a_file_of_variables_is_refused_by_line_and_size(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("A=1\nno assignment here\n")
    with pytest.raises(InvalidConfig, match=r"\.env:2: no NAME=value"):
        read_env_file(file, {})
    file.write_bytes(b"A=" + b"x" * MAX_ENV_FILE_BYTES)
    with pytest.raises(InvalidConfig, match="larger than"):
        read_env_file(file, {})
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_env_file(tmp_path / "none", {})
