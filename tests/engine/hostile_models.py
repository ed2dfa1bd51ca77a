"""Loads models with adversarial files one after the other, in a process that they may bring down.

    python -m tests.engine.hostile_models FAMILY FOLDER

prints a line for each case before it begins and one with its outcome: `refused CODE: message`, `served FORWARD`, or
`wrong …` where the vectors are not those of the transformers library. A crash ends the output behind a begun case.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tests.support.models import edit, read, write

from teimgr.engine.engine import Engine, EngineOptions
from teimgr.engine.job import InferOptions, Job, Lane
from teimgr.engine.text.tokenizer import TextTokenizer, TokenizeOptions
from teimgr.errors import TeimgrError
from teimgr.models.reading import read_layout

TEXTS = ["rain on the harbour", "one", "a longer text about boats and the harbour in the rain " * 4]
_NAN, _INFINITE = float("nan"), float("inf")
# Of config.json, with the weights as they are.
EDITS: dict[str, tuple[Any, ...]] = {
    "num_attention_heads": (0, -1, 3, 8, 2**31, 2.5, "4", [4], True),
    "num_key_value_heads": (0, -2, 3, 8, 2**40),
    "head_dim": (0, -8, 7, 16, 2**31, "8"),
    "hidden_size": (0, -32, 31, 64, 2**40, 32.5, "32"),
    "intermediate_size": (0, -1, 63, 2**20, 2**40),
    "num_hidden_layers": (-1, 0, 1, 3, 10**9),
    "vocab_size": (0, -1, 10, 2**24, 2**40),
    "max_position_embeddings": (-1, 0, 8, 2**24, 2**40),
    "type_vocab_size": (-1, 0, 1, 2**24),
    "layer_norm_eps": (_NAN, _INFINITE, -1.0, 0, "x", 1e40),
    "rms_norm_eps": (_NAN, -1.0, "x"),
    "norm_eps": (_NAN, -1.0, "x"),
    "rope_theta": (0, _NAN, -1.0, "x"),
    "pad_token_id": (-1, -(2**40), 10**6, "x"),
    "sliding_window": (0, -1, 2**40, "x"),
    "local_attention": (0, -1, 1, 2**40),
    "global_attn_every_n_layers": (0, -1),
    "hidden_act": ("nope", 3, ""),
    "position_embedding_type": ("relative_key", "alibi", 3),
    "alibi_starting_size": (512,),
    "partial_rotary_factor": (0.3, 2.0, -1),
}
# With random weights of the shapes that the library makes of it.
REMADE: tuple[dict[str, Any], ...] = (
    {"num_attention_heads": 1},
    {"num_attention_heads": 32},
    {"num_attention_heads": 1, "head_dim": 2048},
    {"num_attention_heads": 3, "hidden_size": 33},
    {"num_attention_heads": 1, "hidden_size": 1040},
    {"head_dim": 7},
    {"head_dim": 6},
    {"num_key_value_heads": 1},
    {"num_key_value_heads": 3},
    {"num_key_value_heads": 8},
    {"hidden_size": 1, "num_attention_heads": 1},
    {"intermediate_size": 1},
    {"intermediate_size": 63},
    {"num_hidden_layers": 0},
    {"num_hidden_layers": 5},
    {"vocab_size": 10},
    {"max_position_embeddings": 8},
    {"type_vocab_size": 1},
    {"type_vocab_size": 0},
    {"layer_norm_eps": 0.0},
    {"sliding_window": 1},
    {"local_attention": 2},
    {"partial_rotary_factor": 0.5},
)


def main(base: Path, folder: Path) -> None:
    logging.disable()
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for name, prepare in cases(read(base / "config.json")):
        case = folder / "case"
        shutil.rmtree(case, ignore_errors=True)
        shutil.copytree(base, case)
        print(json.dumps({"case": name}), flush=True)
        try:
            prepare(case)
        except Exception as error:  # not even the library makes such a model
            print(json.dumps({"outcome": f"not made: {type(error).__name__}"}), flush=True)
            continue
        print(json.dumps({"outcome": outcome(case)}), flush=True)


def cases(config: dict[str, Any]) -> Iterator[tuple[str, Callable[[Path], None]]]:
    for key, values in EDITS.items():
        for value in values if key in config else values[:1]:
            yield f"{key} = {value!r}", lambda case, key=key, value=value: edit(case / "config.json", **{key: value})
    for changes in REMADE:
        if changes.keys() <= config.keys():
            yield f"remade with {changes}", lambda case, changes=changes: _remake(case, changes)
    for name, spoil in WEIGHTS.items():
        yield f"weights: {name}", lambda case, spoil=spoil: _spoil_weights(case, spoil)
    for name, change in TOKENIZERS.items():
        yield f"tokenizer: {name}", lambda case, change=change: _spoil_tokenizer(case, change)


def _remake(case: Path, changes: dict[str, Any]) -> None:
    config = transformers.AutoConfig.from_pretrained(case, **changes)
    torch.manual_seed(0)
    kind = transformers.AutoModel._model_mapping[type(config)]
    pooler = {"add_pooling_layer": False} if config.model_type in ("bert", "xlm-roberta") else {}
    kind(config, **pooler).save_pretrained(case)
    edit(case / "1_Pooling" / "config.json", word_embedding_dimension=config.hidden_size)


Weights = dict[str, torch.Tensor]


def _first(weights: Weights, ending: str = "weight") -> str:
    return next(name for name, tensor in weights.items() if name.endswith(ending) and tensor.dim() == 2)


WEIGHTS: dict[str, Callable[[Weights], Weights]] = {
    "one is missing": lambda all: {name: tensor for name, tensor in all.items() if name != _first(all)},
    "transposed": lambda all: {name: tensor.T.contiguous() for name, tensor in all.items()},
    "flat": lambda all: {name: tensor.flatten() for name, tensor in all.items()},
    "empty": lambda all: {name: tensor[:0] for name, tensor in all.items()},
    "one row": lambda all: {name: tensor[:1].contiguous() for name, tensor in all.items()},
    "whole numbers": lambda all: {name: tensor.to(torch.int64) for name, tensor in all.items()},
    "not numbers": lambda all: {name: tensor * _NAN for name, tensor in all.items()},
    "three dimensions": lambda all: {name: tensor[None] for name, tensor in all.items()},
}


def _spoil_weights(case: Path, spoil: Callable[[Weights], Weights]) -> None:
    from safetensors.torch import load_file, save_file

    save_file(spoil(load_file(case / "model.safetensors")), case / "model.safetensors", {"format": "pt"})


def _added(content: str, id: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": id, "content": content, **flags}


_TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
TOKENIZERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no object": lambda file: [],
    "no model": lambda file: file | {"model": None},
    "an unknown model": lambda file: file | {"model": {"type": "Nope"}},
    "an empty vocabulary": lambda file: file | {"model": file["model"] | {"vocab": {}, "merges": []}},
    "a huge id": lambda file: file | {"model": {"type": "WordLevel", "vocab": {"a": 2**32 - 1}, "unk_token": "a"}},
    "a negative id": lambda file: file | {"model": {"type": "WordLevel", "vocab": {"a": -1}, "unk_token": "a"}},
    "ids beyond the table": lambda file: file | {"added_tokens": [*file["added_tokens"], _added("rain", 10**6)]},
    "no unknown token": lambda file: file | {"model": {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "a"}},
    "a long prefix": lambda file: (
        file
        | {
            "pre_tokenizer": {"type": "Whitespace"},
            "model": {
                "type": "BPE",
                "vocab": {"a": 0, "b": 1, "ab": 2},
                "merges": [["a", "b"]],
                "continuing_subword_prefix": "ééééé",
            },
        }
    ),
    "merges of nothing": lambda file: file | {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}},
    "Unigram without an unknown": lambda file: file | {"model": {"type": "Unigram", "vocab": [["b", 0.0]]}},
    "Unigram's unknown outside": lambda file: file | {"model": {"type": "Unigram", "vocab": [["b", 0.0]], "unk_id": 9}},
    "Unigram of nothing": lambda file: file | {"model": {"type": "Unigram", "vocab": []}},
    "Unigram without numbers": lambda file: file | {"model": {"type": "Unigram", "vocab": [["b", "x"]], "unk_id": 0}},
    "a broken charsmap": lambda file: (
        file | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}}
    ),
    "a short charsmap": lambda file: file | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AA=="}},
    "a long charsmap": lambda file: (
        file | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "CAAAAAEAAAABAAAA"}}
    ),
    "a broken pattern": lambda file: (
        file | {"normalizer": {"type": "Replace", "pattern": {"Regex": "(" * 99}, "content": ""}}
    ),
    "a template of unknown tokens": lambda file: (
        file | {"post_processor": _TEMPLATE | {"single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}]}}
    ),
    "a template of nothing": lambda file: file | {"post_processor": _TEMPLATE | {"single": []}},
    "a long stride": lambda file: (
        file | {"truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 9, "direction": "Right"}}
    ),
    "a deep normalizer": lambda file: file | {"normalizer": _deep(100)},
    "a very deep normalizer": lambda file: file | {"normalizer": _deep(900)},
}


def _deep(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "Lowercase"}
    for _ in range(levels):
        found = {"type": "Sequence", "normalizers": [found]}
    return found


def _spoil_tokenizer(case: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    write(case / "tokenizer.json", change(read(case / "tokenizer.json")))


def outcome(case: Path) -> str:
    arrived = threading.Event()
    try:
        engine = Engine.load(EngineOptions(path=case, model_id="m", dtype="float32"), lambda job: arrived.set())
    except TeimgrError as error:
        return f"refused {type(error).__name__}: {error.message[:300]}"
    except BaseException as error:
        return f"wrong exception {type(error).__name__}: {error}"[:300]
    try:
        job = Job(TEXTS, InferOptions(), Lane.INTERACTIVE)
        engine.submit(job)
        if not arrived.wait(30):
            return "wrong: no answer"
        if len(job.errors) == len(TEXTS):
            return f"wrong: every text fails: {job.errors[0].message[:200]}"
        return _compared(case, engine, job)
    except Exception as error:
        return f"wrong: the library fails, and we do not: {type(error).__name__}: {error}"[:300]
    finally:
        engine.close(5)


def _compared(case: Path, engine: Engine, job: Any) -> str:
    """Whether the vectors are the library's, of each text alone."""
    layout = read_layout(case)
    tokenizer = TextTokenizer(layout, min(layout.max_length, 16384))
    kind = transformers.AutoModel._model_mapping[type(transformers.AutoConfig.from_pretrained(case))]
    module = kind.from_pretrained(case, dtype=torch.float32).eval()
    for number, encoded in enumerate(tokenizer.encode(TEXTS, TokenizeOptions())):
        if number in job.errors or isinstance(encoded, Exception):
            continue
        row = job.vectors[number]
        with torch.inference_mode():
            hidden = module(torch.tensor([list(map(int, encoded.ids))])).last_hidden_state[0]
        pooled = {"mean": hidden.mean(0), "cls": hidden[0], "last_token": hidden[-1]}[layout.poolings[0]]
        expected = torch.nn.functional.normalize(pooled, dim=0).numpy()
        if not np.allclose(row, expected, atol=1e-4, equal_nan=True):
            return f"wrong vectors by {np.abs(row - expected).max()}, {engine.info.forward}"
    return f"served {engine.info.forward}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
