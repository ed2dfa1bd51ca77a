"""Ollama's embedding routes: https://docs.ollama.com/api/embed.

`/api/embed` answers with vectors of length 1. The older `/api/embeddings` takes one text, answers with the model's
vector without scaling, and refuses texts that are too long. Errors that Ollama has have its words. The content type is
ignored, because curl sends that of a form.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import Field, WithJsonSchema

from teimgr.engine.job import InferOptions, Job, Output
from teimgr.engine.job import Input as EngineInput
from teimgr.spec import KEEP_ALIVE, LOAD_NS
from teimgr.wire.frames import HttpReply, HttpRequest
from teimgr.worker import http_inference as http
from teimgr.worker import input_checks
from teimgr.worker.dialects.tokens import Cut, fitted

# Ignored options of Ollama: sampling of generated text, and loading of the model.
_WITHOUT_EFFECT = frozenset(
    {
        *("num_keep", "seed", "num_predict", "top_k", "top_p"),
        *("min_p", "tfs_z", "typical_p", "repeat_last_n", "temperature"),
        *("repeat_penalty", "presence_penalty", "frequency_penalty", "mirostat", "mirostat_tau"),
        *("mirostat_eta", "penalize_newline", "stop", "draft_num_predict", "numa"),
        *("num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv"),
        *("logits_all", "vocab_only", "use_mmap", "use_mlock", "num_thread"),
        *("embedding_only",),
    }
)
_NUM_CTX = "num_ctx"
_SHOWN_NAME = 64

# Units of a duration in Go's syntax: `1h30m`, `-1s`, `0`.
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(rf"(\d+\.?\d*|\.\d+)({'|'.join(_UNITS_S)})")
_DURATION_CHARS = 64
_DURATION_LIMIT_S = 2**63 / 1e9  # the limit of Go's durations, 292 years

KeepAlive = Annotated[
    Any,
    Field(description="seconds, or a duration such as 5m; 0 unloads at once, negative keeps forever"),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}, {"type": "null"}]}),
]
Options = Annotated[
    http.AnyObject | None,
    Field(description="num_ctx truncates texts to that many tokens; options of sampling are ignored"),
]
BodyT = TypeVar("BodyT", bound=http.Body)


class OllamaEmbedRequest(http.Body):
    """`POST /api/embed`: a text or texts to embed; without input the model is loaded."""

    model: http.ModelName = None
    input: http.TokenizeInput | None = None
    truncate: Annotated[bool | None, Field(description="false refuses texts that are too long")] = None
    dimensions: Annotated[http.U32 | None, Field(description="leading dimensions to keep; 0: all")] = None
    options: Options = None
    keep_alive: KeepAlive = None
    expect_fingerprint: http.ExpectedSpace = None

    def job(self, inputs: Sequence[EngineInput], began_ns: int, load_ns: int, served: http.ServedModel) -> http.JobSpec:
        input_checks.need_texts(inputs, "input")
        options = InferOptions(
            frozenset({Output.DENSE}),
            truncate=served.spec.auto_truncate if self.truncate is None else self.truncate,
            dimensions=self.dimensions or None,
        )

        def encode(job: Job) -> bytes:
            rows = job.vectors
            answer = {"model": self.model or served.name, "embeddings": rows}
            times = {"total_duration": time.monotonic_ns() - began_ns + load_ns, "load_duration": load_ns}
            return http.to_json(answer | times | {"prompt_eval_count": job.tokens}, rows.size + len(rows))

        return http.JobSpec(inputs, options, encode)


class OllamaEmbeddingsRequest(http.Body):
    """`POST /api/embeddings`: one text; its vector is not scaled to length 1."""

    model: http.ModelName = None
    prompt: str | None = None
    input: Annotated[Any, Field(description="not supported; only in /api/embed")] = None
    options: Options = None
    keep_alive: KeepAlive = None
    expect_fingerprint: http.ExpectedSpace = None

    def job(self, inputs: Sequence[EngineInput], served: http.ServedModel) -> http.JobSpec:
        options = InferOptions(frozenset({Output.DENSE}), truncate=False, normalize=False)
        return http.JobSpec(inputs, options, lambda job: http.to_json({"embedding": job.vectors[0]}))


async def embed(inference: http.HttpInference, request: HttpRequest) -> HttpReply:
    began_ns = time.monotonic_ns()
    body = await _read(inference, request, OllamaEmbedRequest)
    kept_s, limit = keep_alive_s(body.keep_alive), _token_limit(body.options)
    if not body.input:
        answer = {"model": body.model or inference.served.name, "embeddings": []}
        return _keeping(kept_s, http.json_reply(http.to_json(answer)))
    inputs = await fitted(
        inference, inference.inputs(body.input), limit, left=False, how=Cut(_NUM_CTX, cuts=body.truncate is not False)
    )
    load_ns = int(request.headers.get(LOAD_NS, "0"))
    return _keeping(kept_s, await inference.respond(partial(body.job, inputs, began_ns, load_ns)))


async def embeddings(inference: http.HttpInference, request: HttpRequest) -> HttpReply:
    body = await _read(inference, request, OllamaEmbeddingsRequest)
    if body.input is not None:
        raise http.BadRequest(400, "input: is of /api/embed; this route takes `prompt`", "input")
    kept_s, limit = keep_alive_s(body.keep_alive), _token_limit(body.options)
    if not body.prompt:
        return _keeping(kept_s, http.json_reply(http.to_json({"embedding": []})))
    inputs = await fitted(inference, inference.inputs(body.prompt), limit, left=False, how=Cut(_NUM_CTX, cuts=False))
    return _keeping(kept_s, await inference.respond(partial(body.job, inputs)))


def _keeping(seconds: float | None, reply: HttpReply) -> HttpReply:
    """The reply, with what the gateway does about the model's stay in memory."""
    return reply if seconds is None else reply._replace(headers={**reply.headers, KEEP_ALIVE: str(seconds)})


def keep_alive_s(value: Any) -> float | None:
    """Seconds that a model stays loaded after the call, infinite if negative; None if the request does not name any.

    Raises:
        BadRequest: it is neither a number nor a duration.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        kind = {bool: "bool", list: "array", dict: "object"}.get(type(value), "value")
        raise http.BadRequest(400, f"keep_alive: takes a number of seconds or a duration, not a {kind}", "keep_alive")
    seconds = _duration_s(value) if isinstance(value, str) else value
    if not seconds < _DURATION_LIMIT_S:
        raise http.BadRequest(400, "keep_alive: a duration of more than 292 years", "keep_alive")
    return float("inf") if seconds < 0 else float(seconds)


def _duration_s(text: str) -> float:
    """The seconds of a duration in Go's notation; raises BadRequest in Go's words."""
    bare = text[1:] if text[:1] in ("+", "-") else text
    parts = list(_PART.finditer(bare)) if len(text) <= _DURATION_CHARS else []
    if bare != "0" and (not bare or "".join(part[0] for part in parts) != bare):
        shown = text[:_DURATION_CHARS]
        raise http.BadRequest(400, f'keep_alive: time: invalid duration "{shown}"; such as 5m or 1h30m', "keep_alive")
    seconds = sum(float(part[1]) * _UNITS_S[part[2]] for part in parts)
    return -seconds if text[0] == "-" else seconds


def _token_limit(options: Mapping[str, Any] | None) -> int | None:
    """The tokens that `options` cut a text to.

    Raises:
        BadRequest: an option is unknown, or `num_ctx` is not a number of tokens.
    """
    for name in options or ():
        if name not in _WITHOUT_EFFECT and name != _NUM_CTX:
            raise http.BadRequest(400, f"options.{name[:_SHOWN_NAME]}: is not supported", "options")
    given = (options or {}).get(_NUM_CTX)
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or given != given // 1:
        raise http.BadRequest(400, f'option "{_NUM_CTX}" must be of type integer', "options")
    if given < 1:
        raise http.BadRequest(400, f"options.{_NUM_CTX}: must be at least 1", "options")
    return int(given)


async def _read(inference: http.HttpInference, request: HttpRequest, kind: type[BodyT]) -> BodyT:
    """The request's body; raises BadRequest with Ollama's sentences for none, and for an `input` of no texts."""
    if not request.body:
        raise http.BadRequest(400, "missing request body")
    try:
        return await inference.read(request, kind, _ANY_TYPE)
    except http.BadRequest as error:
        if error.param != "input" or not error.message.endswith(http.MISMATCH):
            raise
        raise http.BadRequest(400, "invalid input type: `input` takes a text or a list of texts", "input") from None


_ANY_TYPE = http.BodyFormat(accepts=lambda content_type: True)

ROUTES: http.RouteTable = {("POST", "/api/embed"): embed, ("POST", "/api/embeddings"): embeddings}
