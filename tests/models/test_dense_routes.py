"""Dense models whose queries go another way than documents: served by role, as sentence-transformers does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teimgr.errors import ModelLoadFailed
from teimgr.models.directory import missing_file
from teimgr.models.reading import read_layout
from tests.engine.conftest import Served, card, serve  # noqa: F401  fixtures
from tests.support.card import StandInCard
from tests.support.models import TEXTS, build_routed_dense, edit, read, write

LONG = "The quick brown fox jumps over the lazy dog. " * 12


def vectors(served: Served, texts: list[str], **options: Any) -> np.ndarray[Any, Any]:
    job = served.embed(texts, **options)
    assert job.errors == {}
    return np.asarray(job.vectors)


@pytest.mark.parametrize(
    ("way", "default", "saved"),
    [
        *(("two", "document", True), ("two", None, True), ("table", "query", True)),
        *(("behind", "document", True), ("behind", None, False)),
    ],
    ids=["two", "two-first", "table", "behind", "asym"],
)
def test_vectors_of_both_roles_are_those_of_sentence_transformers(
    way: str,
    default: str | None,
    saved: bool,
    tmp_path: Path,
    serve: Callable[..., Served],  # noqa: F811
) -> None:
    from sentence_transformers import SentenceTransformer

    model = build_routed_dense(tmp_path / "model", way, default_route=default, saved=saved)
    assert missing_file(model) is None
    served = serve(model)
    theirs = SentenceTransformer(str(model), device="cpu")
    texts = [*TEXTS, LONG]
    named = {"query": "query", "document": "document" if saved else "doc"}

    info = served.engine.info
    assert (info.prompts, info.default_prompt_name, info.has_routes) == (
        ("query", "document"),
        "document" if default == "document" else None,
        True,
    )
    assert info.outputs == ("dense",)
    assert info.warnings == ()
    for role in ("query", "document", None):
        # Without a role the route is the default one, and its prompt is not added.
        asked = {} if role is None else {"task": named[role], "prompt": served.engine.prompts.text(role)}
        truth = theirs.encode(texts, normalize_embeddings=True, show_progress_bar=False, **asked)
        np.testing.assert_allclose(vectors(served, texts, prompt_name=role), truth, atol=2e-5)
        alone = np.concatenate([vectors(served, [text], prompt_name=role) for text in texts])
        np.testing.assert_allclose(alone, truth, atol=2e-5)


@pytest.mark.parametrize("way", ["two", "behind", "table"])
def test_both_roles_in_one_batch(way: str, tmp_path: Path, serve: Callable[..., Served]) -> None:  # noqa: F811
    served = serve(build_routed_dense(tmp_path / "model", way), cache_bytes=1_000_000)
    roles = ("query", "document")
    expected = {(role, text): vectors(served, [text], prompt_name=role) for role in roles for text in TEXTS}
    assert not np.allclose(expected["query", TEXTS[0]], expected["document", TEXTS[0]], atol=1e-3)

    sent = {(role, text): served.send([text], prompt_name=role) for text in TEXTS for role in roles}

    for each, job in sent.items():
        np.testing.assert_allclose(served.wait(job).vectors, expected[each], atol=2e-5)


def test_another_space_for_another_route_of_queries(tmp_path: Path, serve: Callable[..., Served]) -> None:  # noqa: F811
    first = build_routed_dense(tmp_path / "model", "behind")
    before = serve(first).engine.info.space
    dense = next(first.glob("*/query_0_Dense"))
    edit(dense / "config.json", activation_function="torch.nn.modules.linear.Identity")
    assert serve(first).engine.info.space != before


def router_of(model: Path) -> Path:
    return next(iter([*model.glob("router_config.json"), *model.glob("*/router_config.json")]))


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (
            lambda router: {**router, "structure": {**router["structure"], "image": []}},
            "Router module of .*; image: nothing",
        ),
        (lambda router: {**router, "structure": {"query": []}}, "Router module of query: nothing"),
        (
            lambda router: {**router, "parameters": {"route_mappings": {"(None, 'text')": "query"}}},
            "chosen by route_mappings",
        ),
        (
            lambda router: {**router, "types": dict.fromkeys(router["types"], "own_module.Scaled")},
            "own_module.Scaled, code in the model's own repository: it is run only where",
        ),
    ],
)
def test_other_routes_are_refused_by_name(spoil: Callable[[Any], Any], named: str, tmp_path: Path) -> None:
    model = build_routed_dense(tmp_path / "model", "behind")
    write(router_of(model), spoil(read(router_of(model))))
    with pytest.raises(ModelLoadFailed, match=named):
        read_layout(model)


def test_vectors_of_two_sizes_are_refused(tmp_path: Path, serve: Callable[..., Served]) -> None:  # noqa: F811
    model = build_routed_dense(tmp_path / "model", "behind")
    router = read(router_of(model))
    router["structure"]["document"] = []
    write(router_of(model), router)
    with pytest.raises(ModelLoadFailed, match=r"queries gives vectors of \d+ numbers and the one of documents of \d+"):
        serve(model)


@pytest.mark.parametrize("way", ["two", "behind", "table"])
def test_a_card_serves_both_roles(way: str, card: StandInCard, tmp_path: Path, serve: Callable[..., Served]) -> None:  # noqa: F811
    served = serve(build_routed_dense(tmp_path / "model", way), dtype="float32")
    for role in ("query", "document"):
        together = vectors(served, TEXTS, prompt_name=role)
        alone = np.concatenate([vectors(served, [text], prompt_name=role) for text in TEXTS])
        np.testing.assert_allclose(together, alone, atol=2e-5)
