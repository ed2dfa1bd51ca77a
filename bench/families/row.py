"""A row of the catalogue: a layout on the hub, how it is rebuilt, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fidelity.figures import Matrix
from tests.support.models import MAX_LENGTH

from teimgr.engine.job import Input, Output
from teimgr.spec import Kind

Reference = Callable[[Path, Sequence[Input]], list[Matrix]]
Make = Callable[[Path], Reference | None]

ST = "sentence-transformers"
TRANSFORMERS = "transformers"
PLAIN = "plain forward"
CARD = "model card"


@dataclass(frozen=True, slots=True)
class Row:
    """One layout.

    `make` writes the model to a folder, and gives the reference where that needs what was written; else it is
    `reference`, named `by`. `hub` are examples of repositories. `asked` are the options for the engine that the
    reference answers to. `longest` is the model's maximal length in tokens. `reads_lists`: it is asked for the scores
    of whole lists (`lists`), and its reference is given these. `has_images`: files of images are asked beside texts,
    `only_images` without any, and with `has_sounds` those of sounds. `also` are further inputs: texts with images
    (`senses.Together`).
    """

    key: str
    family: str
    hub: str
    make: Make
    kind: Kind = Kind.EMBEDDING
    by: str = ST
    reference: Reference | None = None
    output: Output = Output.DENSE
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict)
    longest: int = MAX_LENGTH
    note: str = ""
    is_in_tei_readme: bool = False
    takes_pairs: bool = False
    reads_lists: bool = False
    has_images: bool = False
    only_images: bool = False
    has_sounds: bool = False
    also: Sequence[Any] = ()
