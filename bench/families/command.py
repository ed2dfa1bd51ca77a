"""`python -m bench fidelity --families`: measure the catalogue, and write its figures and `docs/models.md`."""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict

from bench.families.document import DOCUMENT, FIGURES, document, figures
from bench.families.runner import measured
from bench.families.table import ROWS
from bench.machine import describe
from bench.progress import say


def run(only: str) -> int:
    """Measure the rows whose key has `only` in it, keep the figures of the others; 1 where one is wrong or fails."""
    chosen = [row for row in ROWS if only in row.key]
    known = figures()["rows"]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    for row, outcome in measured(chosen):
        known[row.key] = {"date": today, **asdict(outcome)}
        say(f"{row.key}: {outcome.state} {outcome.how} {outcome.reason}")
    rows = {row.key: known[row.key] for row in ROWS if row.key in known}
    found = {"machine": describe(), "rows": rows}
    FIGURES.write_text(json.dumps(found, indent=1) + "\n")
    DOCUMENT.write_text(document(ROWS, found))
    if missing := [row.key for row in ROWS if row.key not in rows]:
        say(f"not measured yet: {', '.join(missing)}")
    states = [record["state"] for record in rows.values()]
    say(f"{len(rows)} rows: " + ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states))))
    return 0 if set(states) <= {"exact", "refused"} and not missing else 1
