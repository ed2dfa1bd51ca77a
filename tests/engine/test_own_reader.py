"""A first module of the model's own code: exact alone and in a batch, or refused by name."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from tests.support.models import build, build_routed_dense, edit, write

from teimgr.engine.engine import Engine
from teimgr.engine.job import InferOptions, Output
from teimgr.engine.loading import EngineOptions
from teimgr.errors import ModelLoadFailed, WrongModelKind
from teimgr.models.own_code import code_repositories_of
from teimgr.models.reading import read_layout

NEW = """
from sentence_transformers.sentence_transformer.modules import Transformer


class Reader(Transformer):
    def forward(self, features, **kwargs):
        features = super().forward(features, **kwargs)
        features["token_embeddings"] = features["token_embeddings"].tanh() * 3.0 + 0.1
        return features
"""
# As jina-embeddings-v3 has it: written for sentence-transformers 3, with the arguments of that time.
OLD = """
import json
import os

import torch
from transformers import AutoModel, AutoTokenizer


class Reader(torch.nn.Module):
    def __init__(self, model_name_or_path, max_seq_length=None, model_args=None, tokenizer_args=None,
                 config_args=None, cache_dir=None, backend="torch", **kwargs):
        super().__init__()
        self.auto_model = AutoModel.from_pretrained(model_name_or_path, **(model_args or {}))
        self.tokenizer = AutoTokenizer.from_pretrained(model_name_or_path, **(tokenizer_args or {}))
        self.max_seq_length = max_seq_length

    def tokenize(self, texts, padding=True):
        return self.tokenizer(texts, padding=padding, truncation="longest_first", return_tensors="pt",
                              max_length=self.max_seq_length)

    def forward(self, features, task=None):
        states = self.auto_model(**features, return_dict=False)[0]
        features["token_embeddings"] = states.abs() if task is None else states
        return features

    @staticmethod
    def load(input_path):
        with open(os.path.join(input_path, "sentence_bert_config.json")) as file:
            return Reader(input_path, **json.load(file))
"""
POOLED = """
from sentence_transformers.sentence_transformer.modules import Transformer


class Reader(Transformer):
    def forward(self, features, **kwargs):
        features = super().forward(features, **kwargs)
        states, mask = features.pop("token_embeddings"), features["attention_mask"].clone().unsqueeze(-1)
        features["sentence_embedding"] = (states * mask).sum(dim=1) / mask.sum(dim=1)
        return features
"""
TEXTS = ["fog", "Rain fell on the harbour all night.", "Zürich, Łódź: 3.14159 km²", "fog and rain " * 60, " "]


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))


def model_of(folder: Path, code: str, family: str = "bert", *, pooling: bool = True) -> Path:
    """A model whose first module is the class Reader of `code`, with a `pooling` behind it or a Dense."""
    build(family, folder, modules=("Normalize",) if pooling else ("Dense:Tanh", "Normalize"))
    (folder / "own_first.py").write_text(code)
    rows = json.loads((folder / "modules.json").read_text())
    rows[0]["type"] = "own_first.Reader"
    write(folder / "modules.json", [row for row in rows if pooling or not row["type"].endswith("Pooling")])
    return folder


def routed(folder: Path, code: str, way: str, routes: Sequence[str]) -> Path:
    """A model with a Router, in `routes` of which the class Reader of `code` is the first module; () before it."""
    build_routed_dense(folder, way)
    (folder / "own_first.py").write_text(code)
    file = folder / "router_config.json" if routes else folder / "modules.json"
    names = [f'"{route}_0_Transformer": "' for route in routes] or ['"type": "']
    written = json.dumps(json.loads(file.read_text()))
    for name in names:
        written = re.sub(rf"{name}sentence_transformers[\w.]*\.Transformer", f"{name}own_first.Reader", written)
    file.write_text(written)
    assert written.count("own_first.Reader") == len(names)
    return folder


def vectors(folder: Path, texts: Sequence[str], role: str | None = None, **options: object) -> NDArray[np.float32]:
    """The vectors of a batch, and below them those of each text alone."""
    given = {"dtype": "float32", "trust_remote_code": True} | options
    engine = Engine.load(EngineOptions(path=folder, model_id="own", **given), lambda jobs: None)  # type: ignore[arg-type]
    asked = InferOptions(frozenset({Output.DENSE}), prompt_name=role)
    try:
        together = engine.answers(list(texts), asked, 60).vectors
        alone = [engine.answers([text], asked, 60).vectors[0] for text in texts]
        return np.concatenate([np.asarray(together), np.stack(alone)])
    finally:
        engine.close(5.0)


def cosines(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> NDArray[np.float64]:
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    return (a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


@pytest.mark.parametrize("family", ["bert", "xlm_roberta", "modernbert"])
@pytest.mark.parametrize("code", [NEW, OLD], ids=["since 5", "before 5"])
def test_it_gives_what_sentence_transformers_gives(tmp_path: Path, code: str, family: str) -> None:
    folder = model_of(tmp_path / "model", code, family)
    library = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
    theirs = library.encode(TEXTS, batch_size=1)

    assert cosines(vectors(folder, TEXTS), np.concatenate([theirs, theirs])).min() >= 0.99999


@pytest.mark.parametrize("family", ["bert", "xlm_roberta"])
def test_it_may_give_the_vector_of_a_text_itself(tmp_path: Path, family: str) -> None:
    folder = model_of(tmp_path / "model", POOLED, family, pooling=False)
    library = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
    theirs = library.encode(TEXTS, batch_size=1)

    assert cosines(vectors(folder, TEXTS), np.concatenate([theirs, theirs])).min() >= 0.99999
    engine = Engine.load(EngineOptions(path=folder, model_id="own", trust_remote_code=True), list)
    try:
        assert (engine.info.outputs, engine.info.pooling) == (("dense",), "own")
        with pytest.raises(WrongModelKind, match="one vector for each text alone"):
            engine.answers(TEXTS, InferOptions(frozenset({Output.TOKENS})), 60)
    finally:
        engine.close(5.0)


@pytest.mark.parametrize(
    ("code", "pooling", "reason"),
    [
        (POOLED, True, r"gives no vector for each token \(token_embeddings\), which a Pooling reads"),
        (NEW, False, r"gives no vector for each text \(sentence_embedding\), and modules.json has no Pooling"),
        (
            POOLED.replace("(states * mask)", "(states * mask)[:, features.get('prompt_length', 0) :]"),
            False,
            r"treats the tokens of a prompt in another way \(prompt_length\)",
        ),
    ],
)
def test_what_is_no_vector_of_a_text_or_of_a_token_is_refused(
    tmp_path: Path, code: str, pooling: bool, reason: str
) -> None:
    folder = model_of(tmp_path / "model", code, pooling=pooling)

    with pytest.raises(ModelLoadFailed, match=reason):
        vectors(folder, TEXTS)


@pytest.mark.parametrize(
    ("way", "routes"),
    [("two", ["query"]), ("two", ["query", "document"]), ("table", ["document"]), ("behind", [])],
)
def test_it_may_stand_in_a_route_or_before_a_router(tmp_path: Path, way: str, routes: list[str]) -> None:
    folder = routed(tmp_path / "model", NEW, way, routes)
    library = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
    for role in ("query", "document"):
        prompt = library.prompts[role]
        theirs = library.encode(TEXTS, task=role, prompt=prompt, batch_size=1)
        assert cosines(vectors(folder, TEXTS, role), np.concatenate([theirs, theirs])).min() >= 0.99999
    default = library.encode(TEXTS, prompt=library.prompts["document"], batch_size=1)
    assert cosines(vectors(folder, TEXTS, None), np.concatenate([default, default])).min() >= 0.99999


def test_in_a_route_it_is_refused_where_the_task_changes_more_than_the_route(tmp_path: Path) -> None:
    code = NEW.replace("    def forward", "    forward_kwargs = {'task'}\n\n    def forward")
    code = code.replace(".tanh()", ".tanh() * (2.0 if kwargs.pop('task', None) else 1.0)").replace(
        "super().forward(features, **kwargs)", "super().forward(features)"
    )
    folder = routed(tmp_path / "model", code, "two", ["document"])

    with pytest.raises(ModelLoadFailed, match=r"Reader .* for the task None than for 'document' in one route"):
        vectors(folder, TEXTS)


def test_what_is_not_run_in_a_route_is_refused_by_name(tmp_path: Path) -> None:
    folder = routed(tmp_path / "model", NEW, "two", ["query"])
    with pytest.raises(ModelLoadFailed, match=r"router_config\.json has own_first\.Reader, .*trust_remote_code = true"):
        read_layout(folder)
    file = folder / "router_config.json"
    written = file.read_text()
    for name, reason in (
        ("somebody/code--own_first.Reader", "code of another repository, .*: copy its file into the model's"),
        ("package.module.Reader", "a class of an installed package, .*: copy its file into the model's"),
    ):
        file.write_text(written.replace("own_first.Reader", name))
        with pytest.raises(ModelLoadFailed, match=rf"{name}, {reason}"):
            read_layout(folder, trust_remote_code=True)


BEGIN = "states = self.auto_model"
LENGTH = "max_length=self.max_seq_length"


@pytest.mark.parametrize(
    ("was", "is_now", "reason"),
    [
        ("self.tokenizer(texts", "self.tokenizer(['a ' + text for text in texts]", "makes other tokens of"),
        (
            LENGTH,
            "max_length=16",
            r"cuts a long text to 16 tokens, and by its files the model reads \d+: set max_seq_length",
        ),
        (BEGIN, "features['attention_mask'][:, 0] = 0; " + BEGIN, "leaves tokens out of the pooling"),
        ("return features", "features['token_weights_sum'] = states[..., 0]; return features", "weighs tokens"),
        ("return features", "features['cls_token_embeddings'] = states[:, 1]; return features", "another vector than"),
        ("states.abs()", "states[:, :1]", "gives no vector for each token"),
        ("states.abs()", "self.added(states)", "other results with each load"),
        ("states.abs()", "self.nothing(states)", r"own_first\.Reader of modules\.json fails: AttributeError"),
    ],
)
def test_what_it_does_otherwise_is_refused_by_name(tmp_path: Path, was: str, is_now: str, reason: str) -> None:
    added = "        self.added = torch.nn.Linear(*[self.auto_model.config.hidden_size] * 2)\n"
    code = OLD.replace("        self.max_seq_length =", added + "        self.max_seq_length =")
    folder = model_of(tmp_path / "model", code.replace(was, is_now))

    with pytest.raises(ModelLoadFailed, match=reason):
        vectors(folder, TEXTS)


def test_it_needs_trust_and_sentence_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_of(tmp_path / "model", OLD)
    with pytest.raises(
        ModelLoadFailed, match=r"own_first\.Reader, code in .*: it is run only where .* trust_remote_code"
    ):
        read_layout(folder)

    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ModelLoadFailed, match="is not installed: pip install sentence-transformers"):
        vectors(folder, TEXTS)


def test_a_name_that_is_known_is_code_of_the_models_own_where_its_configuration_is_not(tmp_path: Path) -> None:
    """`custom_st.Transformer`: of jina-embeddings-v3 it is known, and others have the name too."""
    folder = model_of(tmp_path / "model", OLD.replace("Reader", "Transformer"))
    (folder / "own_first.py").rename(folder / "custom_st.py")
    rows = json.loads((folder / "modules.json").read_text())
    write(folder / "modules.json", [{**rows[0], "type": "custom_st.Transformer", "kwargs": ["task"]}, *rows[1:]])
    with pytest.raises(ModelLoadFailed, match="trust_remote_code = true"):
        read_layout(folder)
    theirs = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True).encode(TEXTS, batch_size=1)

    assert cosines(vectors(folder, TEXTS), np.concatenate([theirs, theirs])).min() >= 0.99999
    assert any("kwargs = ['task']" in one for one in read_layout(folder, trust_remote_code=True).warnings)


def test_it_is_run_for_dense_vectors_alone(tmp_path: Path) -> None:
    folder = model_of(tmp_path / "model", OLD)
    write(folder / "config_sentence_transformers.json", {"model_type": "SparseEncoder"})

    with pytest.raises(ModelLoadFailed, match="run only for dense vectors: the model is of the kind sparse"):
        read_layout(folder, trust_remote_code=True)


def test_it_is_not_served_with_a_configuration_of_images(tmp_path: Path) -> None:
    folder = model_of(tmp_path / "model", OLD)
    edit(folder / "config.json", model_type="dinov2")

    with pytest.raises(ModelLoadFailed, match=r"own_first\.Reader, .* and config\.json is of a dinov2 model"):
        read_layout(folder, trust_remote_code=True)


def test_code_that_it_loads_is_fetched_where_the_model_would_be_known(tmp_path: Path) -> None:
    folder = model_of(tmp_path / "model", OLD)
    edit(folder / "config.json", model_type="new", auto_map={"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"})
    rows = json.loads((folder / "modules.json").read_text())
    write(folder / "modules.json", [*rows, {**rows[0], "idx": 3, "path": "3_Own", "type": "somebody/code--own.Scale"}])

    assert code_repositories_of(folder) == ["Alibaba-NLP/new-impl", "somebody/code"]
