"""`teimgr explain`: causes and remedies of an error code, without a daemon."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from teimgr.cli.command import CommandOutput, completes
from teimgr.cli.failures import UsageError
from teimgr.cli.output import say
from teimgr.config.schema import unknown_word
from teimgr.errors import Code
from teimgr.observability.troubleshooting import ADVICE, meaning, to_text


def explain(
    output: CommandOutput,
    code: Annotated[
        str | None,
        typer.Argument(
            metavar="CODE", help="Such as OVERLOADED; none: all codes.", autocompletion=completes(Code.__members__)
        ),
    ] = None,
) -> None:
    """Show the causes and remedies of an error code.

    Error replies of REST have it as `code`, those of gRPC in the trailing metadata `x-teimgr-code`.
    """
    if code is None:
        rows = [(each.name, meaning(each)) for each in Code]
        if output.as_json:
            output.value([{"code": name, "meaning": text} for name, text in rows])
        else:
            output.table(("code", "meaning"), rows)
        return
    if code.upper() not in Code.__members__:
        raise UsageError(f"CODE: {unknown_word(code.upper(), Code.__members__)}")
    known = Code[code.upper()]
    if output.as_json:
        output.value({"code": known.name, "meaning": meaning(known), **asdict(ADVICE[known])})
    else:
        say(to_text(known))
