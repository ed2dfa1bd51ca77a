"""Attacks by the REST API, with a key that may change its own instances: storms of changes, and odd models."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.fuzz.victim.attack import Attack, Strike, head, wire
from tests.fuzz.victim.target import OWN_PREFIX, OWNER, READER, Target

_NAMES = (f"{OWN_PREFIX}0", f"{OWN_PREFIX}1")
_AT_ONCE = 6
_LOADING_S = 8.0
_GONE_S = 15.0


def attacks() -> Iterator[Attack]:
    """Every one of them."""
    yield Attack("rest", "storm of changes", _storm, 8, 200, "calls")
    yield Attack("rest", "lists", _lists, 8, 2000, "calls")
    for name, content in _CONTENTS.items():
        for file in _FILES:
            yield Attack("models", f"{name} in {file}", partial(_model, file, content), most=16 * 2**20)
    for name, sizes in _SHAPES.items():
        yield Attack("models", name, partial(_shape, sizes), 1, 1, "model")


async def _ask(target: Target, verb: str, path: str, body: object = None) -> str:
    content = b"" if body is None else json.dumps(body).encode()
    length = f"content-length: {len(content)}"
    async with wire(target, target.daemon.api_port) as connection:
        await connection.send(head(f"{verb} {path}", "content-type: application/json", length, key=OWNER) + content)
        line = await connection.first_line()
    return " ".join(line.split(" ")[1:2])


async def _without(target: Target, *names: str) -> None:
    """Delete them, and wait until no worker is left that was not there before any attack.

    Raises:
        AssertionError: one stays.
    """
    for name in names:
        await _ask(target, "DELETE", f"/instances/{name}")
    await asyncio.to_thread(_await_gone, target)


def _await_gone(target: Target) -> None:
    end = time.monotonic() + _GONE_S
    while left := set(target.workers()) - set(target.first_workers):
        assert time.monotonic() < end, f"workers of deleted instances live: {sorted(left)}"
        time.sleep(0.3)  # to look takes some of a core


def _storm(target: Target, chance: random.Random, count: int) -> Strike:
    model = str(target.models / READER)

    def one() -> tuple[str, str, object]:
        name = chance.choice(_NAMES)
        return chance.choice(
            (
                ("POST", "/instances", {"name": name, "model_id": model, "dtype": "float32"}),
                ("POST", "/instances", {"name": name, "model_id": model, "replicas": 2}),
                ("DELETE", f"/instances/{name}", None),
                ("POST", f"/instances/{name}/start", None),
                ("POST", f"/instances/{name}/stop", None),
                ("POST", f"/instances/{name}/restart", None),
                ("PATCH", f"/instances/{name}", {"replicas": chance.choice((1, 2))}),
                ("PATCH", f"/instances/{name}", {"max_batch_tokens": chance.choice((512, 1024))}),
            )
        )

    calls = iter([one() for _ in range(count)])

    async def caller() -> set[str]:
        return {await _ask(target, *each) for each in calls}

    async def strike() -> str:
        found = set().union(*await asyncio.gather(*(caller() for _ in range(_AT_ONCE))))
        await _without(target, *_NAMES)
        assert not {status for status in found if status.startswith("5") and status != "503"}, found
        return ", ".join(sorted(found))

    return strike


def _lists(target: Target, chance: random.Random, count: int) -> Strike:
    paths = ("/instances", "/models", "/v1/models", "/metrics", "/openapi.json", f"/instances/{READER}/logs", "/fleet")
    calls = iter([chance.choice(paths) for _ in range(count)])

    async def caller() -> set[str]:
        return {await _ask(target, "GET", path) for path in calls}

    async def strike() -> str:
        return ", ".join(sorted(set().union(*await asyncio.gather(*(caller() for _ in range(_AT_ONCE))))))

    return strike


# Directories that are no models.

_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
    "model.safetensors.index.json",
    "special_tokens_map.json",
    "model.safetensors",
)
_CONTENTS: dict[str, Callable[[bytes, int], bytes]] = {
    "deep list": lambda known, size: b"[" * (size // 2) + b"]" * (size // 2),
    "deep list in the known": lambda known, size: _added(known, b'"a":' + b"[" * (size // 2) + b"]" * (size // 2)),
    "many keys": lambda known, size: _added(known, b",".join(b'"k%d":0' % n for n in range(size // 12))),
    "long text": lambda known, size: _added(known, b'"model_type":"' + b"x" * size + b'"'),
    "long number": lambda known, size: _added(known, b'"hidden_size":' + b"9" * size),
    "lists in it": lambda known, size: _added(known, b'"architectures":[' + b"[0]," * (size // 4) + b"0]"),
    "no JSON": lambda known, size: b"\\" * size,
    "header of safetensors": lambda known, size: struct.pack("<Q", size) + b"[" * size,
}


def _added(known: bytes, entry: bytes) -> bytes:
    """The JSON object with one entry more, which follows the others and so replaces one of its name."""
    text = known.strip()
    return text[:-1] + b"," + entry + b"}" if text.startswith(b"{") and len(text) > 2 else b"{" + entry + b"}"


def _copied(target: Target, name: str) -> Path:
    folder = target.models / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(target.models / READER, folder)
    return folder


def _model(file: str, make: Callable[[bytes, int], bytes], target: Target, chance: random.Random, size: int) -> Strike:
    path = _copied(target, "odd") / file
    path.parent.mkdir(exist_ok=True)
    known = path.read_bytes() if path.exists() and path.suffix == ".json" else b"{}"
    path.write_bytes(make(known, size))
    return partial(_loaded, target, path.parents[1] if "/" in file else path.parent)


def _shape(sizes: dict[str, int], target: Target, chance: random.Random, size: int) -> Strike:
    folder = _copied(target, "odd")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | sizes))
    return partial(_loaded, target, folder)


_SHAPES: dict[str, dict[str, int]] = {
    "one head": {"num_attention_heads": 1},
    "no head": {"num_attention_heads": 0},
    "heads below zero": {"num_attention_heads": -4},
    "width of 2^31": {"hidden_size": 2**31},
    "a million layers": {"num_hidden_layers": 10**6},
    "vocabulary of 2^40": {"vocab_size": 2**40},
    "positions of 2^40": {"max_position_embeddings": 2**40},
    "padding below zero": {"pad_token_id": -1},
    "inner width of nothing": {"intermediate_size": 0},
}


async def _loaded(target: Target, folder: Path) -> str:
    """Create an instance of the directory, wait a while for what becomes of it, look at every list, and delete it."""
    name = f"{OWN_PREFIX}odd"
    statuses = {await _ask(target, "POST", "/instances", {"name": name, "model_id": str(folder), "dtype": "float32"})}
    end = asyncio.get_running_loop().time() + _LOADING_S
    with target.client() as client:
        while asyncio.get_running_loop().time() < end and statuses == {"201"}:
            found = await asyncio.to_thread(client.get, name)
            if found.status in ("running", "failed") or found.restarts > 1:
                break
            await asyncio.sleep(0.3)
    for path in ("/instances", "/models", f"/instances/{name}"):
        statuses.add(await _ask(target, "GET", path))
    await _ask(target, "DELETE", f"/instances/{name}")
    await _without(target, name)
    assert not {status for status in statuses if status.startswith("5")}, statuses
    return ", ".join(sorted(statuses))
