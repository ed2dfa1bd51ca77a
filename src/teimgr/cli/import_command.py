"""`teimgr import`: a configuration from containers of TEI and Infinity, Ollama's list or tei-manager's files."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from teimgr.cli.command import CommandOutput
from teimgr.cli.failures import ExitStatus
from teimgr.cli.output import say
from teimgr.errors import InvalidConfig, Refused

if TYPE_CHECKING:
    from teimgr.cli.migration.draft import Draft

_MODE = 0o600  # the file may contain API keys
_COLUMNS = ("key", "outcome", "in teimgr", "note")


def import_files(
    output: CommandOutput,
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="Compose files; Kubernetes manifests; text with `docker run` lines, `-`: of stdin; Ollama's list; "
            "tei-manager's TOML and state file.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The configuration.")] = Path(
        "teimgr.toml"
    ),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that exists.")] = False,
    env_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Variables of the compose files, instead of the .env beside each."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit status 8 if anything needs a decision.")] = False,
) -> int:
    """Make a configuration from one of TEI, Infinity, Ollama or tei-manager.

    Prints what became of every key of the sources: carried over, same by default, no counterpart, or needs a decision.
    """
    from teimgr.cli.migration.conversion import convert, toml_of
    from teimgr.cli.migration.draft import KeyOutcome

    if out.exists() and not overwrite:
        raise Refused(f"{out} exists; --overwrite replaces it, -o names another")
    draft = convert(files, os.environ, env_file)
    faults, warnings = _write(out, toml_of(draft))
    counted = Counter(each.outcome for each in draft.findings)
    outcomes = {outcome.value: counted[outcome] for outcome in KeyOutcome if counted[outcome]}
    if output.as_json:
        output.value(
            {
                "file": str(out),
                "instances": [each.name for each in draft.instances],
                "findings": [each.to_dict() for each in draft.findings],
                "outcomes": outcomes,
                "environment": draft.environment,
                "faults": faults,
                "warnings": warnings,
            }
        )
    else:
        _print(output, draft, outcomes, out)
        for text in (*faults, *warnings):
            output.note(text)
    if faults:
        return ExitStatus.FAILED
    return ExitStatus.INCOMPLETE if strict and counted[KeyOutcome.DECIDE] else ExitStatus.OK


def _write(out: Path, text: str) -> tuple[list[str], list[str]]:
    """Write the configuration, readable by its owner alone; the faults and warnings of `teimgr config check`.

    Raises:
        InvalidConfig: The file cannot be written.
    """
    from teimgr.config.sources import Source, read
    from teimgr.files import write_atomically

    try:
        write_atomically(out, text.encode(), mode=_MODE)
    except OSError as error:
        raise InvalidConfig(f"{out}: cannot be written: {error.strerror}") from error
    try:
        settings = read(Source(file=out)).settings
        if settings.tls_files is not None:
            settings.tls_files.context()
    except InvalidConfig as error:
        return error.message.splitlines(), []
    return [], [f"{out}: warning: {each}" for each in (*settings.warnings(), *map(str, settings.missing_models()))]


def _print(output: CommandOutput, draft: Draft, outcomes: Mapping[str, int], out: Path) -> None:
    """The findings as tables, one for each service or instance of the sources; then decisions and the next command."""
    from teimgr.cli.migration.draft import KeyOutcome

    for place in dict.fromkeys((each.file, each.place) for each in draft.findings):
        found = [each for each in draft.findings if (each.file, each.place) == place]
        rows = [(each.key, each.outcome.value, each.target, each.note) for each in found]
        if output.is_terminal:
            say(f"\n{': '.join(filter(None, place)) or 'all together'}")
            output.table(_COLUMNS, rows)
        else:
            output.table(("file", "place", *_COLUMNS), [(*place, *row) for row in rows])
    if output.is_terminal:
        output.note("")
    for each in draft.findings:
        if each.outcome is KeyOutcome.DECIDE:
            output.note(f"decide: {each.path}: {each.note}")
    count = len(draft.instances)
    counts = ", ".join(f"{word}: {number}" for word, number in outcomes.items())
    output.note(f"{out}: {count} instance{'s' * (count != 1)}; {counts}")
    given = [f"{name}={shlex.quote(value)}" for name, value in draft.environment.items() if value]
    secrets = [name for name, value in draft.environment.items() if not value]
    if secrets:
        output.note(f"set in the daemon's environment: {', '.join(secrets)}")
    output.note(f"next: {' '.join([*given, 'teimgr serve -c', shlex.quote(str(out))])}")
