"""Models with code of their own that no family here has, run where an instance trusts it; and SentencePiece's files."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.support.models import CORPUS, build, build_routed_dense, edit, read, write
from tests.support.models.further import family_of

from bench.families.references import dense_by_task, none, st_dense
from bench.families.row import ST, Row

_TRUST = {"trust_remote_code": True}
_MODELING = """
import transformers


class OwnConfig(transformers.BertConfig):
    model_type = "own-bert"


class OwnModel(transformers.BertModel):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.last_hidden_state = found.last_hidden_state.tanh()
        return found
"""
_MODULE = """
import json
from pathlib import Path

import torch


class Doubled(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, features):
        vectors = features["sentence_embedding"]
        features["sentence_embedding"] = torch.cat([vectors, vectors.abs() * self.factor], dim=-1)
        return features

    @classmethod
    def load(cls, {parameters}):
        return cls(json.loads(({folder} / "config.json").read_text())["factor"])
"""
_FIRST = """
from sentence_transformers.models import Transformer


class OwnTransformer(Transformer):
    def forward(self, features, **kwargs):
        features = super().forward(features, **kwargs)
        features["token_embeddings"] = features["token_embeddings"].tanh()
        return features
"""
_FIRST_OLD = """
import json
import os

import torch
from transformers import AutoModel, AutoTokenizer


class OwnTransformer(torch.nn.Module):
    def __init__(self, model_name_or_path, max_seq_length=None, model_args=None, tokenizer_args=None,
                 config_args=None, cache_dir=None, backend="torch", **kwargs):
        super().__init__()
        self.auto_model = AutoModel.from_pretrained(model_name_or_path, **(model_args or {}))
        self.tokenizer = AutoTokenizer.from_pretrained(model_name_or_path, **(tokenizer_args or {}))
        self.max_seq_length = max_seq_length

    def tokenize(self, texts, padding=True):
        return self.tokenizer(texts, padding=padding, truncation=True, return_tensors="pt",
                              max_length=self.max_seq_length)

    def forward(self, features, task=None):
        features["token_embeddings"] = self.auto_model(**features, return_dict=False)[0].tanh()
        return features

    @staticmethod
    def load(input_path):
        with open(os.path.join(input_path, "sentence_bert_config.json")) as file:
            return OwnTransformer(input_path, **json.load(file))
"""


_POOLED = """
from sentence_transformers.models import Transformer


class OwnTransformer(Transformer):
    def forward(self, features, **kwargs):
        features = super().forward(features, **kwargs)
        states, mask = features.pop("token_embeddings"), features["attention_mask"].unsqueeze(-1)
        features["sentence_embedding"] = (states * mask).sum(dim=1).tanh()
        return features
"""


def _model(folder: Path) -> None:
    build("bert", folder)
    (folder / "modeling_own.py").write_text(_MODELING)
    auto_map = {"AutoConfig": "modeling_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"}
    edit(folder / "config.json", model_type="own-bert", architectures=["OwnModel"], auto_map=auto_map)


def _module(parameters: str, place: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        build("bert", folder, modules=())
        (folder / "own_module.py").write_text(_MODULE.format(parameters=parameters, folder=place))
        write(folder / "2_Doubled" / "config.json", {"factor": 3.0})
        _add(folder, 2, "2_Doubled", "own_module.Doubled")

    return make


def _first(code: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        build("bert", folder)
        (folder / "own_first.py").write_text(code)
        rows = json.loads((folder / "modules.json").read_text())
        rows[0]["type"] = "own_first.OwnTransformer"
        gives_text = "sentence_embedding" in code
        write(folder / "modules.json", [row for row in rows if not (gives_text and row["type"].endswith("Pooling"))])

    return make


def _routed(folder: Path) -> None:
    build_routed_dense(folder, "two")
    (folder / "own_first.py").write_text(_FIRST)
    router = read(folder / "router_config.json")
    own = {key: "own_first.OwnTransformer" for key in router["types"] if key.endswith("_Transformer")}
    write(folder / "router_config.json", {**router, "types": router["types"] | own})


def _add(folder: Path, at: int, path: str, dotted: str) -> None:
    rows = json.loads((folder / "modules.json").read_text())
    write(folder / "modules.json", [*rows, {"idx": at, "name": str(at), "path": path, "type": dotted}])


def _trusted() -> Iterator[Row]:
    def row(key: str, hub: str, make: Callable[[Path], None], **more: Any) -> Row:
        given: dict[str, Any] = {
            "reference": partial(st_dense, trusted=True),
            "note": "trust_remote_code = true",
        } | more
        return Row(key, "own code", hub, make, by=ST, engine_options=_TRUST, **given)

    yield row("trusted-model", "models with modeling code of their own (auto_map)", _model)
    old = _module("path", "Path(path)")
    yield row("trusted-module", "modules of their own behind the pooling, saved before sentence-transformers 5", old)
    new = _module('path, subfolder="", **others', "(Path(path) / subfolder)")
    yield row("trusted-module-new", "modules of their own behind the pooling, since sentence-transformers 5", new)
    new = "an own first module in modules.json, since sentence-transformers 5"
    yield row("trusted-first", new, _first(_FIRST))
    old = "jinaai/jina-embeddings-v3's kind: an own first module, saved before sentence-transformers 5"
    yield row("trusted-first-old", old, _first(_FIRST_OLD))
    yield row("trusted-first-pooled", "an own first module that gives the vector of a text itself", _first(_POOLED))
    for role in ("document", "query"):
        asked = {"asked": {"prompt_name": role}, "reference": partial(dense_by_task, task=role, trusted=True)}
        hub = f"own first modules in both routes of a Router, role {role}"
        yield row(f"trusted-router-{role}", hub, _routed, **asked)


def _pieces(family: str, name: str, tokenizer: str, **options: Any) -> Callable[[Path], None]:
    """A model whose tokenizer is the file `name` of SentencePiece alone; `options` are those of its training."""

    def make(folder: Path) -> None:
        from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

        buffer = io.BytesIO()
        defaults = {"vocab_size": 400, "model_type": "unigram", "hard_vocab_limit": False, "minloglevel": 2}
        SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS * 20), model_writer=buffer, **(defaults | {"pad_id": -1} | options)
        )
        pieces = SentencePieceProcessor(model_proto=buffer.getvalue())
        build(family, folder)
        torch.manual_seed(0)
        family_of(family).encoder(pieces.get_piece_size() + 8).save_pretrained(folder)
        for given in (*folder.glob("tokenizer*.json"), *folder.glob("special_tokens_map.json")):
            given.unlink()
        (folder / name).write_bytes(buffer.getvalue())
        write(folder / "tokenizer_config.json", {"tokenizer_class": tokenizer, "model_max_length": 96})

    return make


def _refused() -> Iterator[Row]:
    def gpt2(folder: Path) -> None:
        build("gpt2", folder)
        edit(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer", model_input_names=None)

    hub = "uer/gpt2-chinese-cluecorpussnow's kind: GPT-2 with BERT's tokenizer"
    yield Row("refused-gpt2-types", "GPT-2", hub, gpt2, reference=none)


def _sentencepiece() -> Iterator[Row]:
    fairseq = {"unk_id": 0, "bos_id": 1, "eos_id": 2}
    for key, family, shown, name, tokenizer, hub, options in (
        (
            *("xlmr", "xlm_roberta", "XLM-RoBERTa", "sentencepiece.bpe.model", "XLMRobertaTokenizer"),
            *("XLM-RoBERTa embedders with sentencepiece.bpe.model alone", fairseq),
        ),
        (
            *("t5", "t5", "T5", "spiece.model", "T5Tokenizer", "T5 encoders with spiece.model alone"),
            {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
        ),
        (
            *("camembert", "camembert", "CamemBERT", "sentencepiece.bpe.model", "CamembertTokenizer"),
            *("dangvantuan/sentence-camembert-base's kind, sentencepiece.bpe.model alone", fairseq),
        ),
    ):
        note = "the extra sentencepiece"
        yield Row(
            f"pieces-{key}", shown, hub, _pieces(family, name, tokenizer, **options), reference=st_dense, note=note
        )


ROWS = (*_trusted(), *_refused(), *_sentencepiece())
