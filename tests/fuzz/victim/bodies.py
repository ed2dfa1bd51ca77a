"""Attacks by what a request holds: JSON, texts of every script, protobuf and Arrow, up to the limits of bodies."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

from bench import monster_inputs as inputs

from teimgr.wire.pb.tei.v1 import tei_pb2
from tests.fuzz.victim.attack import Attack, Strike, call, post
from tests.fuzz.victim.target import RANKER, READER, SHARED, Target

_MAX_PORT = 2_000_000 - 1000  # the bodies of an instance's own port
_GRPC_MAX = 40 * 2**20 - 64 * 1024
_ROUTES = (
    "/v1/embeddings",
    f"/instances/{SHARED}/embed",
    "/v2/embed",
    "/v1/rerank",
    "/vllm/tokenize",
    "/v1/chat/none",
    "/api/embed",
    "/api/embeddings",
    "/plan",
)
_INSTANCES = (SHARED, SHARED, READER)


def attacks() -> Iterator[Attack]:
    """Every one of them."""
    for name, broken in inputs.BROKEN_JSON.items():
        yield Attack("json", f"broken, {name}", partial(_broken, broken))
        yield Attack("json", f"broken, {name}, instance port", partial(_broken_port, broken), most=_MAX_PORT)
    for name, odd in inputs.ODD_JSON.items():
        yield Attack("json", f"odd, {name}", partial(_odd, odd))
    for name, text in inputs.TEXTS.items():
        yield Attack("text", f"{name}, REST", partial(_rest_text, text))
        yield Attack("text", f"{name}, instance port", partial(_port_text, text), most=_MAX_PORT)
        yield Attack("text", f"{name}, mux", partial(_mux_text, text), most=_GRPC_MAX)
        yield Attack("text", f"{name}, gRPC of the instance port", partial(_port_grpc_text, text), most=_MAX_PORT)
        yield Attack("text", f"{name}, reranker", partial(_ranked_text, text))
    for name, fields in inputs.FIELDS.items():
        yield Attack("protobuf", name, partial(_fields, fields), most=_GRPC_MAX)
    for name, stream in inputs.ARROW.items():
        yield Attack("arrow", name, partial(_arrow, stream), most=16 * 2**20)


def _times(chance: random.Random) -> int:
    return chance.choice((1, 1, 3))


def _broken(make: Callable[[int], bytes], target: Target, chance: random.Random, size: int) -> Strike:
    key = chance.choice(("attacker", "attacker", None))
    return post(target, target.daemon.api_port, chance.choice(_ROUTES), make(size), key=key, times=_times(chance))


def _broken_port(make: Callable[[int], bytes], target: Target, chance: random.Random, size: int) -> Strike:
    path = chance.choice(("/embed", "/v1/embeddings", "/tokenize", "/predict", "/rerank"))
    return post(target, target.ports[SHARED], path, make(size), key=None, times=_times(chance))


def _odd(make: Callable[[str, int], bytes], target: Target, chance: random.Random, size: int) -> Strike:
    return post(
        target, target.daemon.api_port, "/v1/embeddings", make(chance.choice(_INSTANCES), size), times=_times(chance)
    )


def _rest_text(make: Callable[[int], str], target: Target, chance: random.Random, size: int) -> Strike:
    path, body = chance.choice(list(inputs.json_bodies(chance.choice(_INSTANCES), make(size)).values()))
    return post(target, target.daemon.api_port, path, body, times=_times(chance))


def _port_text(make: Callable[[int], str], target: Target, chance: random.Random, size: int) -> Strike:
    path, body = chance.choice(list(inputs.port_bodies(make(size)).values()))
    return post(target, target.ports[chance.choice(_INSTANCES)], path, body, key=None, times=_times(chance))


def _ranked_text(make: Callable[[int], str], target: Target, chance: random.Random, size: int) -> Strike:
    path, body = chance.choice(list(inputs.rerank_bodies(RANKER, make(size)).values()))
    return post(target, target.daemon.api_port, path, body, times=_times(chance))


def _mux_text(make: Callable[[int], str], target: Target, chance: random.Random, size: int) -> Strike:
    calls = [
        *inputs.mux_messages(chance.choice(_INSTANCES), make(size)).values(),
        inputs.rerank_message(RANKER, make(size)),
    ]
    path, message = chance.choice(calls)
    return call(target, target.daemon.grpc_port, path, message, times=_times(chance))


def _port_grpc_text(make: Callable[[int], str], target: Target, chance: random.Random, size: int) -> Strike:
    text = make(size)
    path, message = chance.choice(
        (
            ("/tei.v1.Embed/Embed", tei_pb2.EmbedRequest(inputs=text, truncate=True)),
            ("/tei.v1.Embed/EmbedAll", tei_pb2.EmbedAllRequest(inputs=text, truncate=True)),
            ("/tei.v1.Tokenize/Tokenize", tei_pb2.EncodeRequest(inputs=text)),
        )
    )
    port = target.ports[chance.choice(_INSTANCES)]
    return call(target, port, path, message.SerializeToString(), times=_times(chance))


def _fields(make: Callable[[str, int], bytes], target: Target, chance: random.Random, size: int) -> Strike:
    path = inputs.MUX_SERVICE + chance.choice(("Embed", "EmbedAll", "Tokenize"))
    return call(target, target.daemon.grpc_port, path, make(chance.choice(_INSTANCES), size), times=_times(chance))


def _arrow(make: Callable[[int], bytes], target: Target, chance: random.Random, size: int) -> Strike:
    message = inputs.arrow_message(chance.choice(_INSTANCES), make(size))
    return call(target, target.daemon.grpc_port, inputs.MUX_SERVICE + "EmbedArrow", message, times=_times(chance))
