"""Conversion of a text, whose result has to pass the check of configurations."""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from teimgr.cli.migration.conversion import convert, toml_of
from teimgr.cli.migration.draft import Draft, KeyFinding, KeyOutcome
from teimgr.config.sources import Source, read


@dataclass(frozen=True)
class Converted:
    draft: Draft
    table: dict[str, Any]

    @property
    def instances(self) -> list[dict[str, Any]]:
        return self.table["instances"]  # type: ignore[no-any-return]

    def found(self, key: str) -> KeyFinding:
        """The last finding of this key."""
        return [each for each in self.draft.findings if each.path.endswith(key)][-1]

    def decisions(self) -> list[str]:
        return [each.path for each in self.draft.findings if each.outcome is KeyOutcome.DECIDE]


Convert = Callable[..., Converted]


@pytest.fixture
def converted(tmp_path: Path) -> Convert:
    """Converts texts of files, by name, and reads the result as the daemon does."""

    def convert_texts(environ: dict[str, str] | None = None, /, **texts: str) -> Converted:
        files = []
        for name, text in texts.items():
            stem, _, suffix = name.rpartition("_")
            files.append(tmp_path / f"{stem}.{suffix}")
            files[-1].write_text(textwrap.dedent(text))
        draft = convert(files, environ or {})
        (tmp_path / "out.toml").write_text(toml_of(draft))
        read(Source(file=tmp_path / "out.toml", environ={}))
        return Converted(draft, tomllib.loads(toml_of(draft)))

    return convert_texts


@pytest.fixture
def converted_service(converted: Convert) -> Convert:
    """Converts one service, `tei`, whose table is the text."""

    def convert_service(text: str, **environ: str) -> Converted:
        body = textwrap.indent(textwrap.dedent(text), "    ")
        return converted(environ, compose_yml=f"services:\n  tei:\n{body}")

    return convert_service
