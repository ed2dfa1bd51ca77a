"""The order of predictions and ranks, and the kinds of models that have them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import orjson
import pytest

from teimgr.engine.job import Output
from teimgr.errors import WrongModelKind
from teimgr.spec import KINDS, LoadedModel
from teimgr.worker.scores import need_reranker_grpc, need_reranker_http, output_per_token, predictions, ranks


def info(kind: str) -> LoadedModel:
    return LoadedModel(
        model_id="m",
        model_sha=None,
        dtype="float32",
        device="cpu",
        kind=kind,
        pooling="cls",
        dimension=0,
        max_input_length=8,
        max_batch_tokens=8,
        batching="packed",
    )


def test_predictions_fall_and_equal_ones_come_in_reverse_order() -> None:
    scores = np.array([0.25, 0.5, 0.25, 0.75, 0.25], np.float32)

    assert [label for _, label in predictions(scores, "abcde")] == ["d", "b", "e", "c", "a"]


def test_ranks_fall_and_equal_ones_have_the_higher_index_first() -> None:
    scores = np.array([[0.5], [0.1], [0.5], [-3.0]], np.float32)

    found = ranks(scores)

    assert [rank.row for rank in found] == [2, 0, 1, 3]
    assert [rank.score for rank in found] == sorted(scores[:, 0], reverse=True)


def test_json_has_the_shortest_digits_of_the_float32() -> None:
    [prediction] = predictions(np.array([0.1], np.float32), ["yes"])

    assert orjson.dumps(prediction.score, option=orjson.OPT_SERIALIZE_NUMPY) == b"0.1"


@pytest.mark.parametrize(
    ("need", "refusals"),
    [
        (
            need_reranker_http,
            dict.fromkeys(
                ("embedding", "sparse", "multi-vector", "classifier", "token-classifier"),
                "Backend error: model is not a re-ranker model",
            ),
        ),
        (
            need_reranker_grpc,
            dict.fromkeys(
                ("embedding", "sparse", "multi-vector", "token-classifier"), "model is not a classifier model"
            )
            | {"classifier": "model is not a re-ranker model"},
        ),
    ],
)
def test_each_kind_is_let_through_or_refused_in_teis_words(
    need: Callable[[LoadedModel], None], refusals: dict[str, str]
) -> None:
    found = {}
    for kind in KINDS:
        try:
            need(info(kind))
        except WrongModelKind as error:
            found[kind] = error.message

    assert found == refusals


def test_only_late_interaction_has_token_vectors_of_its_own() -> None:
    outputs = {kind: output_per_token(info(kind)) for kind in KINDS if kind != "token-classifier"}

    assert {kind for kind, output in outputs.items() if output is Output.MULTI_VECTOR} == {"multi-vector"}
