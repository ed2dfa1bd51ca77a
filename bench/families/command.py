"""`python -m bench fidelity --families`: measure the catalogue, and write its figures and `docs/models.md`."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.families.document import DOCUMENT, FIGURES, document, figures
from bench.families.runner import measured
from bench.families.table import ROWS
from bench.machine import describe
from bench.progress import say


def run(only: str, dtypes: Sequence[str]) -> int:
    """Measure the rows whose key has `only` in it, keep the figures of the others; 1 where one is wrong or fails.

    In other types than float32 only the rows are measured that are exact in that.
    """
    known, machine = figures(), describe()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    if only and known["machine"]:
        known.setdefault("later", {})[today] = machine.get("instruction_sets", [])
    else:
        known["machine"], known["later"] = machine, {}
    for dtype in dtypes:
        into = known["rows"] if dtype == "float32" else known.setdefault("types", {}).setdefault(dtype, {})
        served = _exact(known)
        chosen = [row for row in ROWS if only in row.key and (dtype == "float32" or row.key in served)]
        for row, outcome in measured(chosen, dtype):
            into[row.key] = {"date": today, **asdict(outcome)}
            say(f"{row.key} in {dtype}: {outcome.state} {outcome.how} {outcome.reason}")
            _kept(known)  # a limit may end the run
    found = _kept(known)
    rows, types = found["rows"], found["types"]
    DOCUMENT.write_text(document(ROWS, found))
    if missing := [row.key for row in ROWS if row.key not in rows]:
        say(f"not measured yet: {', '.join(missing)}")
    states = [record["state"] for records in (rows, *types.values()) for record in records.values()]
    say(f"{len(rows)} rows: " + ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states))))
    return 0 if set(states) <= {"exact", "near", "refused"} and not missing else 1


def _kept(known: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of today's rows, which is written."""
    served, types = _exact(known), known.get("types", {})
    found = {
        "machine": known["machine"],
        "later": known.get("later", {}),
        "rows": {row.key: known["rows"][row.key] for row in ROWS if row.key in known["rows"]},
        "types": {
            dtype: {row.key: records[row.key] for row in ROWS if row.key in records and row.key in served}
            for dtype, records in types.items()
        },
    }
    FIGURES.write_text(json.dumps(found, indent=1) + "\n")
    return found


def _exact(known: Mapping[str, Any]) -> set[str]:
    return {key for key, record in known["rows"].items() if record["state"] == "exact"}
