"""`bench own_code`: bulk rate of models whose code is on the hub (GTE, JinaBERT), beside that code in plain PyTorch.

The code of both is no class of transformers, so sentence-transformers cannot run it without a hub. In its place stands
the forward that the tests compare with (`tests/support/plain_forwards.py`), over batches of texts of equal length:
sentence-transformers' own batch, without the padding that it would compute.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tests.support import plain_forwards
from tests.support.models.own_code import build_new
from tests.support.models.single_families import build_jina_bert
from tokenizers import Tokenizer
from torch import Tensor

from bench.encoders import Bare, Task
from bench.progress import partial, say
from bench.report import publish

_LAYERS, _WIDTH, _INNER, _HEADS = 12, 768, 3072, 12
_BATCH = 32  # texts of a batch of plain PyTorch, at most
_TOKENS = 4096  # and its tokens, at most
_LONGEST = 512
_GTE = {"rope_scaling": {"type": "ntk", "factor": 2.0}, "rope_theta": 500000, "type_vocab_size": 0}
HEADER = (
    "model",
    "tokens of a text",
    "texts",
    "path",
    "texts/s median",
    "× baseline",
    "least",
    "most",
    "lowest cosine",
)

Forward = Callable[[Tensor], Tensor]


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the scenario."""
    parser.add_argument("--rounds", type=int, default=5, help="passes of each path, in turn (5)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128, 512], help="lengths of texts (32 128 512)")


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    table: list[tuple[Any, ...]] = []
    with partial(), tempfile.TemporaryDirectory() as name:
        for model, build, plain, pooling in (
            ("gte-base-en-v1.5", _gte, plain_forwards.new_impl, "cls"),
            ("jina-embeddings-v2-base", build_jina_bert, plain_forwards.jina_bert, "mean"),
        ):
            (folder := Path(name) / model).mkdir()
            weights, config = build(folder)
            _enlarge(folder, weights, config)
            forward = torch.vmap(lambda ids, w=weights, c=config, plain=plain: plain(w, c, ids))
            engine = Bare(Task("engine", str(folder)))
            try:
                for tokens in options.tokens:
                    table += _compared(model, folder, engine, forward, pooling, tokens, options.rounds)
                    say(f"{model}, {tokens} tokens: × {table[-1][5]}")
            finally:
                engine.close()
    facts = {
        "models": f"{_LAYERS} × {_WIDTH}, random weights, small vocabularies: the hub's layout of each",
        "baseline": f"the authors' forward in PyTorch, float32, up to {_BATCH} texts and {_TOKENS} tokens a batch",
        "teimgr": "the bare engine, float32, the same texts as one bulk job",
        "method": f"{options.rounds} rounds, one pass of each path in turn; ratios within a round",
    }
    rows = [dict(zip(HEADER, row, strict=True)) for row in table]
    publish("own_code", facts, HEADER, table, {"rows": rows})
    return 0


def _gte(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return build_new(folder, **_GTE)


def _enlarge(folder: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Give the model in `folder` the shape of a BERT-base: new weights of the same names, in the dictionary too."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    sizes = {width: _WIDTH, 3 * width: 3 * _WIDTH, inner: _INNER, 2 * inner: 2 * _INNER}
    torch.manual_seed(0)
    larger = {}
    for name, tensor in weights.items():
        head, layer, rest = name.partition("layer.0.")
        shape = [
            sizes.get(size, size) if at or "word_embeddings" not in name else size
            for at, size in enumerate(tensor.shape)
        ]
        if not layer and "layer." in name:
            continue
        for number in range(_LAYERS if layer else 1):
            is_norm = len(shape) == 1 and name.endswith("weight")
            values = torch.ones(shape) if is_norm else torch.randn(shape) * 0.02
            larger[f"{head}layer.{number}.{rest}" if layer else name] = values
    weights.clear()
    weights.update(larger)
    shape_keys = {"hidden_size": _WIDTH, "intermediate_size": _INNER, "num_hidden_layers": _LAYERS}
    config.update(shape_keys, num_attention_heads=_HEADS, max_position_embeddings=_LONGEST)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(larger, folder / "model.safetensors", metadata={"format": "pt"})
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling | {"word_embedding_dimension": _WIDTH}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": _LONGEST, "do_lower_case": False}))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"model_max_length": _LONGEST}))


def _compared(
    model: str, folder: Path, engine: Bare, forward: Forward, pooling: str, tokens: int, rounds: int
) -> list[tuple[Any, ...]]:
    """The rows of both paths for texts of one length."""
    tokenizer = _tokenizer(folder)
    texts = _texts(tokenizer, tokens)

    def plain(some: list[str]) -> Any:
        ids = torch.tensor([encoded.ids for encoded in tokenizer.encode_batch(some)])
        with torch.inference_mode():
            hidden = torch.cat([forward(part) for part in ids.split(min(_BATCH, _TOKENS // tokens))])
            vectors = hidden[:, 0] if pooling == "cls" else hidden.mean(dim=1)
            return torch.nn.functional.normalize(vectors, dim=-1).numpy()

    paths: dict[str, Callable[[list[str]], Any]] = {"plain PyTorch": plain, "teimgr engine": engine.encode}
    expected, found = plain(texts), engine.encode(texts)
    cosine = float((expected * found).sum(axis=1).min())
    seconds: dict[str, list[float]] = {path: [] for path in paths}
    for _ in range(rounds):
        for path, call in paths.items():
            began = time.perf_counter()
            call(texts)
            seconds[path].append(time.perf_counter() - began)
    rows = []
    for path, took in seconds.items():
        ratios = [ours and base / ours for base, ours in zip(seconds["plain PyTorch"], took, strict=True)]
        shown = (statistics.median(ratios), min(ratios), max(ratios))
        rate = f"{len(texts) / statistics.median(took):.1f}"
        rows.append((model, tokens, len(texts), path, rate, *(f"{one:.2f}" for one in shown), f"{cosine:.7f}"))
    return rows


def _tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _texts(tokenizer: Tokenizer, tokens: int) -> list[str]:
    """Texts of the model's own words that have `tokens` tokens each, special ones included."""
    words = ["the", "lazy", "fox", "dog", "fog", "and", "brown", "jumps", "over", "quick"]
    chance = np.random.default_rng(0)
    found: list[str] = []
    while len(found) < _TOKENS // tokens:
        text = ""
        while len(tokenizer.encode(more := f"{text} {chance.choice(words)}".strip()).ids) <= tokens:
            text = more
        if len(tokenizer.encode(text).ids) == tokens:
            found.append(text)
    return found
