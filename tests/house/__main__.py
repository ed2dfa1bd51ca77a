"""`python -m tests.house [--root CHECKOUT] [--paths] [--names]`: figures of the code's structure, as a table."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.house.figures import modules, repeated_base_names, repeated_class_names, table
from tests.house.paths import NAMES, trace

HERE = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__)
    parser.add_argument("--root", type=Path, default=HERE, help="checkout to measure; default: this one")
    parser.add_argument("--paths", action="store_true", help="trace one real call of each path, in every process")
    parser.add_argument("--names", action="store_true", help="list the repeated names")
    options = parser.parse_args()
    root = options.root.resolve()
    for what, figure in table(root).items():
        print(f"{what:40} {figure}")
    if options.names:
        found = modules(root)
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
