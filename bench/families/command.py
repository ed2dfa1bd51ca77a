"""`python -m bench fidelity --families`: measure the catalogue, and write its figures and `docs/models.md`."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict

from bench.families.document import DOCUMENT, FIGURES, document, figures
from bench.families.runner import measured
from bench.families.table import IN_OTHER_TYPES, ROWS
from bench.machine import describe
from bench.progress import say


def run(only: str, dtypes: Sequence[str]) -> int:
    """Measure the rows whose key has `only` in it, keep the figures of the others; 1 where one is wrong or fails.

    In other types than float32 only the rows of `IN_OTHER_TYPES` are measured.
    """
    known = figures()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    for dtype in dtypes:
        into = known["rows"] if dtype == "float32" else known.setdefault("types", {}).setdefault(dtype, {})
        chosen = [row for row in ROWS if only in row.key and (dtype == "float32" or row.key in IN_OTHER_TYPES)]
        for row, outcome in measured(chosen, dtype):
            into[row.key] = {"date": today, **asdict(outcome)}
            say(f"{row.key} in {dtype}: {outcome.state} {outcome.how} {outcome.reason}")
    rows = {row.key: known["rows"][row.key] for row in ROWS if row.key in known["rows"]}
    types = {
        dtype: {row.key: records[row.key] for row in ROWS if row.key in records and row.key in IN_OTHER_TYPES}
        for dtype, records in known.get("types", {}).items()
    }
    found = {"machine": describe(), "rows": rows, "types": types}
    FIGURES.write_text(json.dumps(found, indent=1) + "\n")
    DOCUMENT.write_text(document(ROWS, found))
    if missing := [row.key for row in ROWS if row.key not in rows]:
        say(f"not measured yet: {', '.join(missing)}")
    states = [record["state"] for records in (rows, *types.values()) for record in records.values()]
    say(f"{len(rows)} rows: " + ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states))))
    return 0 if set(states) <= {"exact", "near", "refused"} and not missing else 1
