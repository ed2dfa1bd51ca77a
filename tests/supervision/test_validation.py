"""A model that cannot be served is refused when its instance is created, where its files are on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.fleet import Fleet
from tests.support.models import build, build_classifier, build_yes_no_reranker, edit

from teimgr.errors import InvalidConfig
from teimgr.spec import InstanceSpec, WorkerSpec
from teimgr.supervision.validation import check_model


def orders(model_id: Path | str, **more: object) -> WorkerSpec:
    return WorkerSpec(name="a", model_id=str(model_id), **more)  # type: ignore[arg-type]


def test_what_can_be_served_passes(tmp_path: Path) -> None:
    check_model(orders(build("bert", tmp_path / "bert"), kind="embedding"))
    check_model(orders(build_yes_no_reranker(tmp_path / "reranker", layout="saved")))


def test_a_kind_that_is_not_served_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = build_classifier("bert", tmp_path)
    edit(path / "config.json", architectures=["BertForTokenClassification"])

    with pytest.raises(InvalidConfig, match=f"model_id: {path} cannot be served: BertForTokenClassification labels"):
        check_model(orders(path))


def test_orders_that_contradict_the_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match='kind = "reranker" contradicts the model\'s files'):
        check_model(orders(build("bert", tmp_path), kind="reranker"))


def test_code_of_the_models_own_needs_the_instances_word(tmp_path: Path) -> None:
    path = build("bert", tmp_path)
    edit(path / "config.json", auto_map={"AutoModel": "modeling.JinaBertModel"})

    with pytest.raises(InvalidConfig, match="trust_remote_code = true"):
        check_model(orders(path))
    check_model(orders(path, trust_remote_code=True))


def test_a_template_is_not_run_by_the_daemon(tmp_path: Path) -> None:
    path = build_yes_no_reranker(tmp_path, layout="saved")
    (path / "chat_template.jinja").write_text(
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
    )

    check_model(orders(path))


@pytest.mark.parametrize("model_id", ["/nowhere/at/all", "nobody/has-this-model", "no id at all"])
def test_what_is_not_here_is_left_to_the_worker(model_id: str) -> None:
    check_model(orders(model_id))


async def test_the_manager_refuses_it_before_anything_is_stored(fleet: Fleet, tmp_path: Path) -> None:
    path = build("bert", tmp_path / "model")

    for request in ({"kind": "reranker"}, {"pooling": "splade"}, {"extra_args": ("--kind", "classifier")}):
        with pytest.raises(InvalidConfig, match=r"kind = |pooling "):
            await fleet.manager.create(InstanceSpec(name="a", model_id=str(path), **request))  # type: ignore[arg-type]
    assert fleet.manager.list() == []
