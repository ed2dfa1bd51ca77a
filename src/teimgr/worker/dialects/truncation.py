"""vLLM's `truncate_prompt_tokens`: truncates texts, ids and pairs to a number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field

from teimgr.engine.job import Input as EngineInput
from teimgr.errors import InputTooLong
from teimgr.wire.json_scan import Steps, in_steps
from teimgr.worker import http_inference as http

_PAIR_TOKENS = 2  # the most special tokens of a pair in addition to those of a text

FIELD = "truncate_prompt_tokens"
Tokens = Annotated[
    int | None, Field(ge=-1, description="truncate to this many tokens; -1: to the model's limit; absent: do not")
]
Side = Literal["left", "right"] | None


def token_limit(tokens: int | None, served: http.ServedModel) -> int | None:
    """The tokens that texts are cut to before the engine's own truncation; None if that suffices.

    Raises:
        BadRequest: it is 0.
    """
    if tokens == 0:
        raise http.BadRequest(400, f"{FIELD}: must be -1 or at least 1", FIELD)
    return None if tokens is None or not 0 < tokens < served.model.max_input_length else tokens


class Cut(NamedTuple):
    """The field with the limit, the prompt counted towards it (None: the default one), and whether texts are cut."""

    field: str = FIELD
    prompt_name: str | None = None
    cuts: bool = True


_BY_DEFAULT = Cut()


async def fitted(
    inference: http.HttpInference, inputs: list[EngineInput], tokens: int | None, *, left: bool, how: Cut = _BY_DEFAULT
) -> list[EngineInput]:
    """The inputs, each of at most `tokens` tokens, special ones and the prompt included.

    Raises:
        BadRequest: that leaves none of a text.
        InputTooLong: a text has more, and is not to be cut.
    """
    limit = token_limit(tokens, inference.served)
    if limit is None:
        return inputs
    inputs = await inference.as_texts(inputs)
    work = partial(_fit, inference, limit=limit, left=left, how=how)
    cut = await inference.dispatcher.in_tokenizer_turns(in_steps(work, inputs))
    if (
        not how.cuts
        and (longer := next((row for row, text in enumerate(cut) if text is not inputs[row]), None)) is not None
    ):
        error = InputTooLong(f"`{how.field}` is {limit}", limit, f"more than {limit} tokens")
        if len(inputs) > 1:
            error.name_input(longer)
        raise error
    return cut


async def fitted_documents(
    inference: http.HttpInference, queries: Sequence[str], documents: list[str], tokens: int | None, *, left: bool
) -> list[str]:
    """Documents cut so that each has at most `tokens` tokens together with its query; errors as `fitted`."""
    limit = token_limit(tokens, inference.served)
    if limit is None:
        return documents
    return await inference.dispatcher.in_tokenizer_turns(_fit_pairs(inference, queries, documents, limit, left))


def _fit(inference: http.HttpInference, one: EngineInput, *, limit: int, left: bool, how: Cut) -> EngineInput:
    """The input itself where it is short enough."""
    if isinstance(one, np.ndarray):
        return one if len(one) <= limit else one[-limit:] if left else one[:limit]
    if not isinstance(one, str) or not one:
        return one
    engine = inference.dispatcher.engine
    text = engine.tokenizer.cut(one, limit, left=left)
    over = len(engine.tokenize(text, True, how.prompt_name)) - limit
    if over <= 0:
        return one if text == one else text
    room = len(engine.tokenizer.tokenize(text, False, "")) - over
    if room < 1:
        raise http.BadRequest(400, f"{how.field}: {limit} leave no token of the text", how.field)
    return engine.tokenizer.cut(text, room, left=left)


def _fit_pairs(
    inference: http.HttpInference, queries: Sequence[str], documents: Sequence[str], limit: int, left: bool
) -> Steps[list[str]]:
    engine = inference.dispatcher.engine
    taken = yield from in_steps(lambda query: len(engine.tokenize(query, True, None)) + _PAIR_TOKENS, queries)
    room = [limit - taken[min(row, len(taken) - 1)] for row in range(len(documents))]
    if min(room, default=1) < 1:
        raise http.BadRequest(400, f"{FIELD}: {limit} leave no token of a document", FIELD)
    cut = partial(engine.tokenizer.cut, left=left)
    return (yield from in_steps(lambda pair: cut(*pair), list(zip(documents, room, strict=True))))
