"""A listwise reranker measured: lists of several lengths, all at once and one by one, as a worker scores them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from tests.fidelity.figures import Matrix
from tests.fidelity.measure import Asker
from tests.support.models import CORPUS, TEXTS

from teimgr.engine.job import InferOptions, Output, Pair
from teimgr.engine.text.listwise import list_scores
from teimgr.worker.calls import Part
from teimgr.worker.scores import VECTORS, Prompt, lists_of, prompts_of

DocumentList = tuple[str, Sequence[str]]
_WORDS = " ".join(CORPUS).split()
_LONG = " ".join(CORPUS * 40)
_OPTIONS = InferOptions(frozenset({Output.SCORES}), listed=True)

LISTS: tuple[DocumentList, ...] = (
    *((TEXTS[3], TEXTS[:count]) for count in (1, 2, 5, 10)),
    (TEXTS[4], TEXTS[::-1]),
    (TEXTS[2], (TEXTS[1], _LONG, TEXTS[4])),
    (_LONG, TEXTS[:3]),
    ("", (TEXTS[5], " ")),
    (TEXTS[2], [" ".join(_WORDS[place : place + 2]) for place in range(126)]),
)
"""From one document to more than one prompt has; a text and a query that are cut; no text."""


def scores(asker: Asker, lists: Sequence[DocumentList]) -> list[Matrix]:
    """The score of each document of each list, [1], all in one job."""
    return [score for each in _scores(asker, asyncio.run(_prompts(asker, lists))) for score in each[:, None]]


async def _prompts(asker: Asker, lists: Sequence[DocumentList]) -> list[list[Prompt]]:
    async def here(work: Any, *arguments: Any) -> Any:
        return work(*arguments)

    found = []
    for query, documents in lists:
        pairs = [Pair(query, document) for document in documents]
        part = Part(range(len(pairs)), pairs, _OPTIONS)
        prompt = asker.engine.tokenizer.lists
        assert prompt is not None
        found.append(await prompts_of(lists_of([part]), prompt, here, lambda: None))
    return found


def _scores(asker: Asker, prompts: Sequence[Sequence[Prompt]]) -> list[np.ndarray]:
    vectors = iter(asker.ask([one.ids for of_list in prompts for one in of_list], VECTORS))
    return [list_scores([next(vectors) for _ in of_list]) for of_list in prompts]
