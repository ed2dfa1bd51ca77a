"""Write the generated pages and plots of `docs/`: `python -m docsite`; with `--check` only name those out of date.

docs/cli.md, docs/metrics.md, docs/contract.md and docs/conformance.md have commands of their own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from docsite import errors_pages, grpc_page, performance_page, plots, rest_page, settings_page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES: Mapping[str, Callable[[], str]] = {
    "reference/settings.md": settings_page.to_markdown,
    "reference/rest.md": rest_page.to_markdown,
    "reference/grpc.md": grpc_page.to_markdown,
    "reference/errors.md": errors_pages.reference,
    "troubleshooting.md": errors_pages.troubleshooting,
    "explanation/performance.md": performance_page.to_markdown,
    **{f"images/plots/{name}.svg": plot for name, plot in plots.PLOTS.items()},
}
"""What is generated, by its path below docs/."""


def main() -> int:
    """The exit status: 1 where `--check` found a stale file."""
    parser = argparse.ArgumentParser(prog="python -m docsite", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 where a file is stale")
    if parser.parse_args().check:
        stale = stale_pages()
        for name in stale:
            print(f"docs/{name} is out of date: run `python -m docsite`")
        return int(bool(stale))
    for name, make in PAGES.items():
        path = DOCS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(make())
    return 0


def stale_pages() -> list[str]:
    """The generated files that are missing or differ from what would be written now."""
    return [name for name, make in PAGES.items() if not (DOCS / name).exists() or (DOCS / name).read_text() != make()]


if __name__ == "__main__":
    raise SystemExit(main())
