"""One result, three forms: a table on the terminal, Markdown to read later, JSON to compute with."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.machine import describe, instruction_set
from bench.progress import incomplete

RESULTS = Path(__file__).resolve().parent / "results"


def publish(
    scenario: str, facts: dict[str, Any], header: Sequence[str], rows: Sequence[Sequence[Any]], data: dict[str, Any]
) -> None:
    """Print the table and write `results/SCENARIO-DATE-INSTRUCTIONS.{md,json}`, such as `engine-2026-11-28-avx2`; a
    second run of a day on such a machine replaces the first.

    A run that ended early is `partial-SCENARIO-…`, and says so: it replaces no whole one.
    """
    if reason := incomplete():
        facts = {"incomplete": f"ended by {reason}"} | facts
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    table = markdown_table(header, rows)
    machine = describe()
    document = {"scenario": scenario, "date": today, "machine": machine, "facts": facts, **data}
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / f"{'partial-' if reason else ''}{scenario}-{today}-{instruction_set(machine)}"
    stem.with_suffix(".json").write_text(json.dumps(document, indent=2) + "\n")
    lines = [
        f"# bench {scenario}, {today}, {instruction_set(machine)}",
        "",
        *_facts(facts),
        "",
        table,
        "",
        *machine_lines(machine),
        "",
    ]
    stem.with_suffix(".md").write_text("\n".join(lines))
    print("\n".join(lines[2:-1]))
    print(f"\nwritten: bench/results/{stem.name}.md and .json")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """An aligned Markdown table; the first column to the left, the others to the right."""
    cells = [list(header), *[[_cell(value) for value in row] for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [_line(row, widths) for row in cells]
    rule = (
        "| " + " | ".join("-" * width if not at else "-" * (width - 1) + ":" for at, width in enumerate(widths)) + " |"
    )
    return "\n".join([lines[0], rule, *lines[1:]])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    aligned = [
        text.ljust(width) if not at else text.rjust(width)
        for at, (text, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "| " + " | ".join(aligned) + " |"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _facts(facts: dict[str, Any]) -> list[str]:
    return [f"* {key.replace('_', ' ')}: {value}" for key, value in facts.items()]


def machine_lines(machine: dict[str, Any]) -> list[str]:
    """The machine and the versions of a result, as two sentences."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    sets = ", ".join(machine["instruction_sets"]) or "none of note"
    size = f"{machine['cores']} cores, {machine['cpu']} ({sets}), {machine['memory_gib']} GiB"
    revision = machine.get("revision", "")  # which older results do not have
    return [
        f"Machine: {size}, {machine['system']}.",
        f"Python {machine['python']}, {versions}." + (f" Commit {revision}." if revision else ""),
    ]
