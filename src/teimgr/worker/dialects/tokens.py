"""Tokens of a text and back, in the forms of vLLM (`/tokenize`, `/detokenize`) and Cohere (`/v1/tokenize`, …).

`fitted` cuts texts, ids and pairs to a number of tokens, for vLLM's `truncate_prompt_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import Field

from teimgr.engine.engine import Engine
from teimgr.engine.job import Input as EngineInput
from teimgr.engine.text.tokenizer import TokenSpan
from teimgr.errors import EmptyInput, InputTooLong, InvalidInput, TeimgrError
from teimgr.wire.frames import HttpReply, HttpRequest
from teimgr.wire.json_scan import Steps, in_steps
from teimgr.worker import http_inference as http
from teimgr.worker.calls import within

_TOKENS_A_STEP = 4096
_META = {"api_version": {"version": "1"}}


class VllmTokenizeRequest(http.LenientBody):
    """A text to tokenize, without the model's prompt; chat messages are not supported."""

    model: http.ModelName = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: Annotated[bool | None, Field(description="true adds the text of each token")] = None

    def answer(self, engine: Engine) -> Steps[dict[str, Any]]:
        tokens = yield from engine.tokenizer.tokenized(self.prompt, self.add_special_tokens, "")
        return {
            "count": len(tokens),
            "max_model_len": engine.info.max_input_length,
            "tokens": [token.id for token in tokens],
            "token_strs": (yield from pieces(self.prompt, tokens)) if self.return_token_strs else None,
        }


class VllmDetokenizeRequest(http.LenientBody):
    """Token ids of a text."""

    model: http.ModelName = None
    tokens: http.Ids

    def answer(self, engine: Engine) -> Steps[dict[str, Any]]:
        yield
        return {"prompt": _decoded(engine, self.tokens)}


class CohereTokenizeRequest(http.LenientBody):
    """A text to tokenize, without special tokens."""

    model: http.ModelName = None
    text: str

    def answer(self, engine: Engine) -> Steps[dict[str, Any]]:
        tokens = yield from engine.tokenizer.tokenized(self.text, False, "")
        texts = yield from pieces(self.text, tokens)
        return {"tokens": [token.id for token in tokens], "token_strings": texts, "meta": _META}


class CohereDetokenizeRequest(http.LenientBody):
    """Token ids of a text."""

    model: http.ModelName = None
    tokens: http.Ids

    def answer(self, engine: Engine) -> Steps[dict[str, Any]]:
        yield
        return {"text": _decoded(engine, self.tokens), "meta": _META}


TokenRequestT = TypeVar(
    "TokenRequestT", VllmTokenizeRequest, VllmDetokenizeRequest, CohereTokenizeRequest, CohereDetokenizeRequest
)


def pieces(text: str, tokens: list[TokenSpan]) -> Steps[list[str]]:
    """One part of `text` per token, in order; joined they are `text`, since clients cut a text by them.

    What the tokenizer drops, such as spaces, belongs to the token after it, and to the last token at the end; of a text
    without tokens it is the only part. A character of several tokens, as byte-level tokenizers make them, belongs to
    the first of them. The part of a special token around the text is its name.
    """
    encoded, parts, begin = text.encode(), [], 0
    last = max((place for place, token in enumerate(tokens) if not token.special), default=-1)
    for place, token in enumerate(tokens):
        if not place % _TOKENS_A_STEP:
            yield
        if token.special:
            parts.append(token.text)
            continue
        end = len(encoded) if place == last else max(begin, token.stop or 0)
        parts.append(encoded[begin:end].decode())
        begin = end
    return parts or [text]


def _decoded(engine: Engine, ids: list[int]) -> str:
    if not ids:
        raise EmptyInput("`tokens` cannot be empty")
    # A multiple of the model's limit, as for texts.
    if len(ids) > (most := engine.info.max_input_length * _TOKENS_PER_INPUT):
        raise InvalidInput(f"`tokens` must have at most {most} ids. Given: {len(ids)}")
    return engine.tokenizer.decode(ids, False)


_TOKENS_PER_INPUT = 100


def _handler(kind: type[TokenRequestT]) -> http.HttpHandler:
    async def handle(inference: http.HttpInference, request: HttpRequest) -> HttpReply:
        body = await inference.read(request, kind)
        dispatcher = inference.dispatcher
        answer: Callable[[Engine], Steps[dict[str, Any]]] = body.answer
        try:
            found = await dispatcher.in_tokenizer_turns(answer(dispatcher.engine))
            written = await dispatcher.off_loop(http.to_json, found)
            return http.json_reply(within(written, dispatcher.spec.max_message_bytes))
        except TeimgrError as error:
            dispatcher.metrics.failed(error)
            raise

    return handle


VLLM_ROUTES: http.RouteTable = {
    ("POST", "/tokenize"): _handler(VllmTokenizeRequest),
    ("POST", "/detokenize"): _handler(VllmDetokenizeRequest),
}
COHERE_ROUTES: http.RouteTable = {
    ("POST", "/v1/tokenize"): _handler(CohereTokenizeRequest),
    ("POST", "/v1/detokenize"): _handler(CohereDetokenizeRequest),
}


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
