"""Small real servers for the client to talk to: a multiplexer over grpc.aio, a REST side over aiohttp."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
from aiohttp import web

from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2
from teimgr.wire.pb.teimgr.v1 import arrow_pb2

_MODULES = {"tei.v1": tei_pb2, "tei_multiplexer.v1": mux_pb2, "teimgr.v1": arrow_pb2}

DIM = 8
INSTANCE = "mini"
MODEL = "test/mini"


def vector_of(text: str) -> np.ndarray:
    """The vector this server gives to a text: float32 [8], from its digest."""
    return np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint32).astype(np.float32) / 2**32


@dataclass
class Seen:
    """What the server was asked, for tests that look at the wire."""

    embeds: list[mux_pb2.EmbedRequest] = field(default_factory=list)
    arrows: list[mux_pb2.EmbedArrowRequest] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0


@dataclass(frozen=True)
class Certificates:
    """PEM files: an authority, a server named `localhost`, a client, and a client that no authority signed."""

    ca: Path
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path

    def server_context(self) -> ssl.SSLContext:
        """Of a server that requires a certificate of its clients."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.ca)
        context.load_cert_chain(self.server_cert, self.server_key)
        context.verify_mode = ssl.CERT_REQUIRED
        return context


class Multiplexer:
    """The methods the client uses, each a few lines; a text names the failure that it gets.

    A text `refuse` fails with INVALID_ARGUMENT and a code in the trailers, `overload` with RESOURCE_EXHAUSTED,
    `hang` is never answered, `enough` ends a stream without an answer.
    """

    def __init__(self) -> None:
        self.seen = Seen()
        self.hanging = asyncio.Event()
        self.together: asyncio.Barrier | None = None  # unary embeds are answered in groups of its size

    async def check(self, target: mux_pb2.Target, context: grpc.aio.ServicerContext) -> None:
        kind = target.WhichOneof("routing")
        name = target.instance_name if kind == "instance_name" else target.model_id
        if name not in (INSTANCE, MODEL):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Instance '{name}' not found")

    async def embed_one(self, request: mux_pb2.EmbedRequest, context: Any) -> tei_pb2.EmbedResponse:
        await self.check(request.target, context)
        text = request.request.inputs
        if text == "refuse":
            trailers = (("x-teimgr-code", "EMPTY_INPUT"),)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such text", trailers)
        if text == "overload":
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Model is overloaded")
        if text == "hang":
            self.hanging.set()
            await asyncio.Event().wait()
        return tei_pb2.EmbedResponse(embeddings=vector_of(text)[: request.request.dimensions or DIM])

    async def Embed(self, request: mux_pb2.EmbedRequest, context: Any) -> tei_pb2.EmbedResponse:
        seen = self.seen
        seen.embeds.append(request)
        seen.in_flight += 1
        seen.most_in_flight = max(seen.most_in_flight, seen.in_flight)
        try:
            if self.together is not None:
                await self.together.wait()
            return await self.embed_one(request, context)
        finally:
            seen.in_flight -= 1

    async def EmbedStream(
        self, requests: AsyncIterator[mux_pb2.EmbedRequest], context: Any
    ) -> AsyncIterator[tei_pb2.EmbedResponse]:
        empty = True
        async for request in requests:
            empty = False
            if request.request.inputs == "enough":
                return
            yield await self.embed_one(request, context)
        if empty:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "Empty stream")

    async def EmbedArrow(self, request: mux_pb2.EmbedArrowRequest, context: Any) -> mux_pb2.EmbedArrowResponse:
        self.seen.arrows.append(request)
        await self.check(request.target, context)
        return mux_pb2.EmbedArrowResponse(arrow_ipc=answer(request))

    async def EmbedArrowStream(
        self, requests: AsyncIterator[mux_pb2.EmbedArrowRequest], context: Any
    ) -> AsyncIterator[mux_pb2.EmbedArrowResponse]:
        empty = True
        async for request in requests:
            empty = False
            yield await self.EmbedArrow(request, context)
        if empty:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "Empty stream")

    async def Info(self, request: mux_pb2.InfoRequest, context: Any) -> tei_pb2.InfoResponse:
        await self.check(request.target, context)
        return tei_pb2.InfoResponse(version="1", model_id=MODEL, model_dtype="float32", max_input_length=256)

    async def Tokenize(self, request: mux_pb2.EncodeRequest, context: Any) -> tei_pb2.EncodeResponse:
        start = tei_pb2.SimpleToken(id=101, text="[CLS]", special=True)
        word = tei_pb2.SimpleToken(id=7, text=request.request.inputs, start=0, stop=len(request.request.inputs))
        return tei_pb2.EncodeResponse(tokens=[start, word])

    async def Decode(self, request: mux_pb2.DecodeRequest, context: Any) -> tei_pb2.DecodeResponse:
        return tei_pb2.DecodeResponse(text=" ".join(map(str, request.request.ids)))

    async def EmbedSparse(self, request: mux_pb2.EmbedSparseRequest, context: Any) -> tei_pb2.EmbedSparseResponse:
        self.seen.others.append(request)
        await self.check(request.target, context)
        entries = [tei_pb2.SparseValue(index=at, value=ord(char)) for at, char in enumerate(request.request.inputs)]
        return tei_pb2.EmbedSparseResponse(sparse_embeddings=entries)

    async def EmbedAll(self, request: mux_pb2.EmbedAllRequest, context: Any) -> tei_pb2.EmbedAllResponse:
        self.seen.others.append(request)
        await self.check(request.target, context)
        tokens = [tei_pb2.TokenEmbedding(embeddings=vector_of(word)) for word in request.request.inputs.split()]
        return tei_pb2.EmbedAllResponse(token_embeddings=tokens)

    async def Predict(self, request: mux_pb2.PredictRequest, context: Any) -> tei_pb2.PredictResponse:
        self.seen.others.append(request)
        await self.check(request.target, context)
        return tei_pb2.PredictResponse(predictions=[tei_pb2.Prediction(label=request.request.inputs, score=0.5)])

    async def PredictPair(self, request: mux_pb2.PredictPairRequest, context: Any) -> tei_pb2.PredictResponse:
        self.seen.others.append(request)
        await self.check(request.target, context)
        label = "+".join(request.request.inputs)
        return tei_pb2.PredictResponse(predictions=[tei_pb2.Prediction(label=label, score=0.25)])

    async def RerankStream(
        self, requests: AsyncIterator[mux_pb2.RerankStreamRequest], context: Any
    ) -> tei_pb2.RerankResponse:
        """A text `overload` ends it at once, whatever is still to come; `hang` is never answered."""
        received = []
        async for request in requests:
            await self.check(request.target, context)
            received.append(request.request)
            self.seen.others.append(request)
            if request.request.text == "overload":
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Model is overloaded")
            if request.request.text == "hang":
                self.hanging.set()
                await asyncio.Event().wait()
        if not received:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "Empty stream")
        texts = [inner.text for inner in received]
        inner = tei_pb2.RerankRequest(texts=texts, return_text=received[0].return_text)
        return await self.Rerank(mux_pb2.RerankRequest(request=inner), context)

    async def Infer(self, request: arrow_pb2.ArrowRequest, context: Any) -> arrow_pb2.ArrowResponse:
        self.seen.others.append(request)
        await self.check(request.target, context)
        return arrow_pb2.ArrowResponse(arrow_ipc=infer_answer(request))

    async def InferStream(
        self, requests: AsyncIterator[arrow_pb2.ArrowRequest], context: Any
    ) -> AsyncIterator[arrow_pb2.ArrowResponse]:
        async for request in requests:
            yield await self.Infer(request, context)

    async def Rerank(self, request: mux_pb2.RerankRequest, context: Any) -> tei_pb2.RerankResponse:
        inner = request.request
        ranks = [
            tei_pb2.Rank(index=index, score=float(len(text)), text=text if inner.return_text else None)
            for index, text in enumerate(inner.texts)
        ]
        return tei_pb2.RerankResponse(ranks=sorted(ranks, key=lambda rank: -rank.score))


def answer(request: mux_pb2.EmbedArrowRequest) -> bytes:
    """One row per text; nulls and `refuse` fail alone; `garbage` makes the whole reply unreadable."""
    texts = pa.ipc.open_stream(request.arrow_ipc).read_all().column(0).to_pylist()
    if "garbage" in texts:
        return b"garbage"
    dtype = np.float16 if request.output_dtype == mux_pb2.OUTPUT_DTYPE_F16 else np.float32
    failed = np.array([text in (None, "refuse") for text in texts], bool)
    rows = [np.zeros(DIM) if request.noop or text is None else vector_of(text) for text in texts]
    values = pa.array(np.array(rows, dtype).reshape(-1))
    vectors = pa.FixedSizeListArray.from_arrays(values, DIM, mask=pa.array(failed))
    errors = pa.array(["no such text" if bad else None for bad in failed], pa.utf8())
    batch = pa.record_batch([vectors, errors], names=["embeddings", "error"])
    sink = pa.BufferOutputStream()
    codec = "lz4" if request.compression == mux_pb2.ARROW_COMPRESSION_LZ4 else None
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def infer_answer(request: arrow_pb2.ArrowRequest) -> bytes:
    """The key columns, a column `length` of the texts' lengths, and no errors; `garbage` makes the reply unreadable."""
    table = pa.ipc.open_stream(request.arrow_ipc).read_all()
    texts = table["text"].to_pylist()
    if "garbage" in texts:
        return b"garbage"
    reply = table.select(list(request.key_columns)).append_column("length", pa.array([len(text) for text in texts]))
    if "enough" in texts:
        reply = reply.slice(1)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, reply.schema) as writer:
        writer.write_table(reply)
    return sink.getvalue().to_pybytes()


def handlers(multiplexer: Multiplexer) -> tuple[grpc.GenericRpcHandler, ...]:
    """Every method of the two services that `multiplexer` has."""
    services = (
        mux_pb2.DESCRIPTOR.services_by_name["TeiMultiplexer"],
        arrow_pb2.DESCRIPTOR.services_by_name["Arrow"],
    )
    return tuple(_handlers_of(service, multiplexer) for service in services)


def _handlers_of(service: Any, multiplexer: Multiplexer) -> grpc.GenericRpcHandler:
    shapes: dict[tuple[bool, bool], Callable[..., Any]] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    made = {
        method.name: shapes[method.client_streaming, method.server_streaming](
            getattr(multiplexer, method.name),
            request_deserializer=message(method.input_type).FromString,
            response_serializer=message(method.output_type).SerializeToString,
        )
        for method in service.methods
        if hasattr(multiplexer, method.name)
    }
    return grpc.method_handlers_generic_handler(service.full_name, made)


def message(descriptor: Any) -> Any:
    """The class of a message descriptor."""
    return getattr(_MODULES[descriptor.file.package], descriptor.name)


class Daemon:
    """The routes of instances and models over dictionaries; an instance is running after `polls_to_run` requests.

    A model `broken` fails instead, and `GET /instances/slow` is never answered.
    """

    def __init__(self, polls_to_run: int = 3) -> None:
        self.polls_to_run = polls_to_run
        self.instances: dict[str, dict[str, Any]] = {}
        self.polls: dict[str, int] = {}
        self.models: dict[str, dict[str, Any]] = {}
        self.is_ready = True

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_get("/ready", self.ready)
        app.router.add_get("/instances", self.list)
        app.router.add_post("/instances", self.create)
        app.router.add_get("/instances/slow", self.hang)
        app.router.add_get("/instances/{name}", self.get)
        app.router.add_delete("/instances/{name}", self.delete)
        app.router.add_get("/instances/{name}/logs", self.logs)
        app.router.add_post("/instances/{name}/{verb}", self.act)
        app.router.add_get("/models", self.list_models)
        app.router.add_post("/models", self.add_model)
        app.router.add_post("/models/{model}/download", self.download)
        app.router.add_post("/models/{model}/load", self.load)
        app.router.add_delete("/models/{model}", self.delete_model)
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "healthy", "timestamp": "2026-01-01T00:00:00Z"})

    async def ready(self, request: web.Request) -> web.Response:
        return web.json_response({"ready": self.is_ready}, status=200 if self.is_ready else 503)

    async def hang(self, request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def list(self, request: web.Request) -> web.Response:
        return web.json_response(list(self.instances.values()))

    async def create(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["name"] in self.instances:
            return failure(409, "INSTANCE_EXISTS", f"Instance '{body['name']}' already exists")
        view = {"port": 8080, "status": "starting", "gpu_id": None, "newer_key": [1]} | body
        self.instances[body["name"]] = view
        return web.json_response(view, status=201)

    async def get(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.instances:
            return failure(404, "INSTANCE_NOT_FOUND", f"Instance '{name}' not found")
        view = self.instances[name]
        self.polls[name] = self.polls.get(name, 0) + 1
        if view["status"] == "starting" and self.polls[name] >= self.polls_to_run:
            broken = view["model_id"] == "broken"
            view |= {"status": "failed", "reason": "no weights"} if broken else {"status": "running", "pid": 7}
        return web.json_response(view)

    async def act(self, request: web.Request) -> web.Response:
        name, verb = request.match_info["name"], request.match_info["verb"]
        view = self.instances[name]
        if verb == "stop" and view["status"] == "stopped":
            return failure(409, "NOT_RUNNING", f"Instance '{name}' is not running (status: stopped)")
        view["status"] = "stopped" if verb == "stop" else "starting"
        return web.json_response(view)

    async def delete(self, request: web.Request) -> web.Response:
        return web.json_response(self.instances.pop(request.match_info["name"]))

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response([{"model_id": name, "status": "available"} for name in self.models])

    async def add_model(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.models[body["model_id"]] = body
        return web.json_response(body, status=201)

    async def download(self, request: web.Request) -> web.StreamResponse:
        """Two events in pieces of three bytes, with a comment between; a model `org/gated` fails, `org/cut` ends."""
        model = request.match_info["model"]
        if model == "no/such":
            return failure(404, "MODEL_NOT_FOUND", "Model 'no/such' is not on the hub")
        self.models[model] = await request.json()
        last = {
            "org/gated": 'event: failed\ndata: {"error": "accept it first", "code": "MODEL_GATED"}\n\n',
            "org/cut": "",
        }.get(model, f'id: 2\nevent: done\ndata: {{"model_id": "{model}"}}\n\n')
        text = f'event: progress\ndata: {{"bytes_done": 1}}\n\n: still here\n\n{last}'.encode()
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for start in range(0, len(text), 3):
            await reply.write(text[start : start + 3])
        return reply

    async def load(self, request: web.Request) -> web.Response:
        return web.json_response({"model_id": request.match_info["model"], "status": "verified"} | await request.json())

    async def delete_model(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"model_id": request.match_info["model"]} | self.models.pop(request.match_info["model"])
        )

    async def logs(self, request: web.Request) -> web.Response:
        lines = ["a", "b", "c"]
        start, end, _ = slice(
            *(int(request.query[key]) if key in request.query else None for key in ("start", "end"))
        ).indices(3)
        body = {"lines": lines[start:end], "start": start, "end": end, "total_lines": 3}
        return web.json_response(body)


def failure(status: int, code: str, text: str) -> web.Response:
    """The daemon's error shape."""
    return web.json_response({"error": text, "code": code, "timestamp": "2026-01-01T00:00:00Z"}, status=status)


@asynccontextmanager
async def serve(daemon: Daemon, context: ssl.SSLContext | None = None, path: Path | None = None) -> AsyncIterator[str]:
    """The daemon's routes on a free port, or the Unix socket at `path`; the URL to it."""
    runner = web.AppRunner(daemon.app(), shutdown_timeout=0.1)
    await runner.setup()
    site: web.BaseSite
    if path is None:
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    else:
        site = web.UnixSite(runner, path, ssl_context=context)
    await site.start()
    try:
        if path is not None:
            yield f"{'https+' if context else ''}unix:{path}"
            return
        yield f"{'https' if context else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
