"""The table: every kind of model that is served, in at least two architectures, and how its truth is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from bench import weights

from teimgr.engine.job import Input, Output, Pair
from teimgr.errors import InvalidConfig, ModelLoadFailed, TeimgrError
from tests.fidelity import references
from tests.fidelity.figures import LIMITS, REAL_WEIGHTS_LIMITS, Figures, Limits, Matrix
from tests.fidelity.measure import measure
from tests.support.models import (
    CORPUS,
    FAMILIES,
    MAX_LENGTH,
    build,
    build_classifier,
    build_cross_encoder,
    build_embedding_gemma,
    build_m3,
    build_modular_cross_encoder,
    build_multi_vector,
    build_prompted_reranker,
    build_splade,
    build_static,
    build_yes_no_reranker,
)

Build = Callable[[Path], Path]
Reference = Callable[[Path, Sequence[Input]], list[Matrix]]

# Rows of the table in their order.
DENSE_ENCODERS = "dense encoders"
DENSE_DECODERS = "dense decoders"
MODULES = "modules and poolings"
SPARSE = "sparse"
TOKENS = "token vectors"
LATE = "late interaction"
M3 = "three outputs at once"
CROSS_ENCODERS = "cross-encoders"
LLM_RERANKERS = "LLM rerankers"
CLASSIFIERS = "classifiers"
STATIC = "static embeddings"

_DECODERS = ("gemma3", "llama", "mistral", "qwen2", "qwen3")
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True, slots=True)
class Case:
    """A model on disk, its inputs, and the reference."""

    row: str
    name: str
    make: Build
    reference: Reference
    output: Output = Output.DENSE
    pairs: bool = False
    engine_options: dict[str, Any] = field(default_factory=dict)
    infer_options: dict[str, Any] = field(default_factory=dict)
    longest: int = MAX_LENGTH
    limits: Mapping[str, Limits] = field(default_factory=lambda: LIMITS)

    def figures(
        self, folder: Path, count: int, seed: int = 0, dtypes: Sequence[str] = ("float32",)
    ) -> dict[str, Figures | TeimgrError]:
        """Make the model in `folder`, and compare `count` inputs of 1 to more than `longest` tokens, in each dtype; the
        refusal of a dtype that the model is not served in.
        """
        path = self.make(folder)
        inputs = list(texts(count, self.longest, seed))
        asked: Sequence[Input] = list(pairs(count, self.longest, seed)) if self.pairs else inputs
        expected = self.reference(path, asked)
        found: dict[str, Figures | TeimgrError] = {}
        for dtype in dtypes:
            try:
                found[dtype] = measure(
                    path,
                    asked,
                    expected,
                    self.output,
                    dtype=dtype,
                    limits=self.limits[dtype],
                    engine_options=self.engine_options,
                    infer_options=self.infer_options,
                    seed=seed,
                )
            except (InvalidConfig, ModelLoadFailed) as refusal:
                found[dtype] = refusal
        return found


def texts(count: int, longest: int, seed: int) -> Iterator[str]:
    """Random words, evenly many of every length from one word to some past the limit."""
    dice = random.Random(seed)
    words = [word for line in CORPUS for word in line.split()]
    for i in range(count):
        wanted = 1 + i * (longest + longest // 8) // max(1, count - 1)
        yield " ".join(dice.choice(words) for _ in range(max(1, wanted // 2)))


def pairs(count: int, longest: int, seed: int) -> Iterator[Pair]:
    """Random texts two by two: short against long, and the other way round."""
    ours = list(texts(count, longest, seed))
    others = ours.copy()
    random.Random(seed + 1).shuffle(others)
    for first, second in zip(ours, others, strict=True):
        yield Pair(first, second)


def _dense_families() -> Iterator[Case]:
    for family in FAMILIES:
        row = DENSE_DECODERS if family in _DECODERS else DENSE_ENCODERS
        yield Case(row, family, partial(build, family), references.dense)
    yield Case(DENSE_DECODERS, "gemma3 as EmbeddingGemma", build_embedding_gemma, references.dense)
    prompts = {"query": "Instruct: find the harbour\nQuery: ", "document": ""}
    instructed = partial(build, "qwen3", prompts=prompts, default_prompt_name="document")
    yield Case(
        DENSE_DECODERS,
        "qwen3 with an instruction",
        instructed,
        partial(references.dense, prompt_name="query"),
        infer_options={"prompt_name": "query"},
    )
    yield MINILM


def _minilm(folder: Path) -> Path:
    return weights.minilm()


MINILM = Case(
    DENSE_ENCODERS,
    "all-MiniLM-L6-v2 (real weights)",
    _minilm,
    references.dense,
    longest=256,
    limits=REAL_WEIGHTS_LIMITS,
)


def _modules() -> Iterator[Case]:
    for pooling in ("cls", "mean", "max", "weightedmean", "mean_sqrt_len_tokens", "lasttoken", "cls+mean", "mean+max"):
        for family in ("bert", "modernbert"):
            yield Case(MODULES, f"{family}, {pooling}", partial(build, family, pooling=pooling), references.dense)
    for modules in (("Dense:Tanh",), ("Dense", "Dense", "Normalize"), ("LayerNorm",), ("Normalize", "Dense:Tanh")):
        for family in ("roberta", "distilbert"):
            name = f"{family}, then {', '.join(modules)}"
            yield Case(MODULES, name, partial(build, family, modules=modules), references.dense)


def _sparse() -> Iterator[Case]:
    for family in ("bert", "distilbert", "roberta", "modernbert"):
        for strategy, activation in (("max", "relu"), ("sum", "relu"), ("max", "log1p_relu")):
            make = partial(build_splade, family, strategy=strategy, activation=activation)
            yield Case(SPARSE, f"{family}, {strategy}, {activation}", make, references.sparse, Output.SPARSE)
    yield Case(
        SPARSE,
        "distilbert, bare masked-LM, pooling = splade",
        partial(build_splade, "distilbert", layout="plain"),
        references.sparse,
        Output.SPARSE,
        engine_options={"pooling": "splade"},
    )


def _tokens() -> Iterator[Case]:
    for family in ("bert", "modernbert", "mpnet", "qwen3"):
        yield Case(TOKENS, family, partial(build, family), references.tokens, Output.TOKENS)


def _late() -> Iterator[Case]:
    for role in ("query", "document"):
        for family, layout in (("bert", "saved"), ("modernbert", "saved"), ("bert", "pylate"), ("bert", "stanford")):
            for attend in (False, True):
                yield Case(
                    LATE,
                    f"{family}, {layout}, {role}, expansion {'seen' if attend else 'unseen'}",
                    partial(build_multi_vector, family, layout=layout, attend=attend),
                    partial(references.multi_vector, role=role),
                    Output.MULTI_VECTOR,
                    infer_options={"prompt_name": role},
                )


def _m3() -> Iterator[Case]:
    wide = partial(build_m3, multi_vector_width=48)
    yield Case(M3, "xlm_roberta, dense", build_m3, references.dense)
    yield Case(M3, "xlm_roberta, sparse", build_m3, partial(references.m3, part="sparse"), Output.SPARSE)
    yield Case(M3, "xlm_roberta, multi-vector", build_m3, partial(references.m3, part="multi"), Output.MULTI_VECTOR)
    yield Case(M3, "xlm_roberta, wider", wide, partial(references.m3, part="multi"), Output.MULTI_VECTOR)


def _cross_encoders() -> Iterator[Case]:
    for family in ("bert", "roberta", "xlm_roberta", "distilbert", "modernbert", "deberta_v2", "qwen3", "gte"):
        make = partial(build_cross_encoder, family)
        yield Case(CROSS_ENCODERS, f"{family}, sigmoid", make, references.scores, Output.SCORES, pairs=True)
    for family in ("modernbert", "bert"):
        make = partial(build_modular_cross_encoder, family)
        yield Case(CROSS_ENCODERS, f"{family}, scores of modules", make, references.scores, Output.SCORES, pairs=True)
    for layout in ("version-4", "saved"):
        make = partial(build_cross_encoder, "bert", layout=layout)
        yield Case(CROSS_ENCODERS, f"bert, identity, {layout}", make, references.scores, Output.SCORES, pairs=True)


def _llm_rerankers() -> Iterator[Case]:
    card = partial(references.qwen3_reranker, instruction=_INSTRUCTION, max_length=256)
    make = partial(build_yes_no_reranker, layout="plain")
    yield Case(LLM_RERANKERS, "qwen3, model card", make, card, Output.SCORES, pairs=True)
    for family, name in (("qwen2", "mxbai-rerank-v2"), ("gemma", "bge-reranker-v2-gemma")):
        yield Case(
            LLM_RERANKERS,
            f"{family}, prompt of {name}",
            partial(_prompted, family),
            partial(references.prompted_reranker, family=family, max_length=512),
            Output.SCORES,
            infer_options={"raw_scores": True},
            pairs=True,
        )
    make = partial(build_yes_no_reranker, layout="saved")
    yield Case(LLM_RERANKERS, "qwen3, LogitScore", make, references.scores, Output.SCORES, pairs=True)


def _prompted(family: Literal["qwen2", "gemma"], folder: Path) -> Path:
    return build_prompted_reranker(folder, family)


def _classifiers() -> Iterator[Case]:
    for family in ("bert", "roberta", "distilbert", "modernbert", "deberta_v2", "albert", "electra", "qwen3"):
        for both in (False, True):
            yield Case(
                CLASSIFIERS,
                f"{family}, softmax, {'pairs' if both else 'texts'}",
                partial(build_classifier, family),
                partial(references.classes, activation="softmax"),
                Output.SCORES,
                pairs=both,
            )
    many = partial(build_classifier, "roberta", multi_label=True)
    sigmoid = partial(references.classes, activation="sigmoid")
    yield Case(CLASSIFIERS, "roberta, many labels, sigmoid", many, sigmoid, Output.SCORES)
    mean = partial(build_classifier, "modernbert", classifier_pooling="mean")
    softmax = partial(references.classes, activation="softmax")
    yield Case(CLASSIFIERS, "modernbert, mean pooling, softmax", mean, softmax, Output.SCORES)


def _static() -> Iterator[Case]:
    yield Case(STATIC, "StaticEmbedding", build_static, references.dense)
    for mapped in (False, True):
        name = "Model2Vec" + (", mapped vocabulary" if mapped else "")
        yield Case(STATIC, name, partial(build_static, layout="model2vec", mapped=mapped), references.dense)


CASES: tuple[Case, ...] = (
    *_dense_families(),
    *_modules(),
    *_sparse(),
    *_tokens(),
    *_late(),
    *_m3(),
    *_cross_encoders(),
    *_llm_rerankers(),
    *_classifiers(),
    *_static(),
)
