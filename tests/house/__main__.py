"""`python -m tests.house [--root CHECKOUT] [--paths] [--names]`: figures of the code's structure, as a table.

`--check` prints those that are above limits.json and fails then; `--lower` makes lower figures the limits.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

from tests.house.assignments import assignments_from_outside
from tests.house.figures import modules, repeated_base_names, repeated_class_names, table
from tests.house.paths import NAMES, trace
from tests.house.ratchet import bounded, limits, lower, risen
from tests.house.words import matches

HERE = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__)
    parser.add_argument("--root", type=Path, default=HERE, help="checkout to measure; default: this one")
    parser.add_argument("--paths", action="store_true", help="trace one real call of each path, in every process")
    parser.add_argument("--names", action="store_true", help="list repeated names and assignments from outside")
    parser.add_argument("--words", action="store_true", help="list the lines that read as translated")
    parser.add_argument("--check", action="store_true", help="only compare with limits.json")
    parser.add_argument("--lower", action="store_true", help="make the figures that have fallen the limits")
    options = parser.parse_args()
    root = options.root.resolve()
    gc.disable()  # syntax trees are no garbage until the end
    now = bounded(root)
    if options.check:
        too_high = risen(now, limits())
        print(*too_high, sep="\n", end="\n" if too_high else "")
        sys.exit(bool(too_high))
    for what, figure in (table(root) | {name: str(value) for name, value in now.items()}).items():
        print(f"{what:40} {figure}")
    if options.lower:
        lower(now)
    if options.words:
        print(*matches(root), sep="\n")
    if options.names:
        found = modules(root)
        print("\nassignments from outside:", *assignments_from_outside(found), sep="\n  ")
        for title, repeated in (("modules", repeated_base_names(found)), ("classes", repeated_class_names(found))):
            print(f"\n{title} with one name:")
            for name, where in repeated.items():
                print(f"  {name}: {', '.join(where)}")
    if options.paths:
        for number, files in trace(root).items():
            print(f"\n{NAMES[number]}: {len(files)} files")
            for file in files:
                print(f"  {file}")


main()
