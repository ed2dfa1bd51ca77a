"""Tokens of a text and back, in the forms of vLLM (`/tokenize`, `/detokenize`) and Cohere (`/v1/tokenize`, …)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import Field

from teimgr.engine.engine import Engine
from teimgr.engine.text.tokenizer import TokenSpan
from teimgr.errors import EmptyInput, InvalidInput, TeimgrError
from teimgr.wire.frames import HttpReply, HttpRequest
from teimgr.wire.json_scan import Steps
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
