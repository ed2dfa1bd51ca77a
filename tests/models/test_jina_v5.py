"""jina-embeddings-v5-text: LoRA adapters by task on Qwen3 or EuroBERT, without its code."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from teimgr.errors import ModelLoadFailed
from teimgr.models.directory import missing_file
from teimgr.models.reading import read_layout
from tests.engine.conftest import Served, serve  # noqa: F401  a fixture
from tests.support import plain_forwards
from tests.support.models import TEXTS, edit
from tests.support.models.single_families import TASKS, build_jina_v5

ASKED = {
    None: ("retrieval", "Document: "),
    "query": ("retrieval", "Query: "),
    "document": ("retrieval", "Document: "),
    "retrieval.query": ("retrieval", "Query: "),
    "retrieval.passage": ("retrieval", "Document: "),
    **{task: (task, "Document: ") for task in TASKS},
}


@pytest.mark.parametrize("nano", [False, True], ids=["small", "nano"])
def test_every_task_is_exact(nano: bool, tmp_path: Path, serve: Callable[..., Served]) -> None:  # noqa: F811
    """By the name of a task or a role, alone and in batches of several tasks; texts without one are documents."""
    merged, config = build_jina_v5(tmp_path, nano=nano)
    served = serve(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(192)
    texts = [*TEXTS[:5], " ".join(TEXTS) * 20]
    sent = [(name, served.send(texts, prompt_name=name)) for name in ASKED]
    sent += [(name, served.send(texts[1:2], prompt_name=name)) for name in (None, "query", "clustering")]

    assert served.engine.info.warnings == ()
    assert served.engine.info.max_input_length == 192
    for name, job in sent:
        found, (task, prompt) = served.wait(job), ASKED[name]
        assert found.errors == {}
        for text, vector in zip(texts if len(found.vectors) > 1 else texts[1:2], found.vectors, strict=True):
            ids = torch.tensor(tokenizer.encode(prompt + text).ids)
            truth = plain_forwards.causal(merged[task], config, ids, both_ways=nano)[-1]
            np.testing.assert_allclose(vector, torch.nn.functional.normalize(truth, dim=0).numpy(), atol=3e-5)


def test_a_text_with_a_prompt_of_its_callers_has_the_weights_of_retrieval(
    tmp_path: Path,
    serve: Callable[..., Served],  # noqa: F811
) -> None:
    build_jina_v5(tmp_path)
    served, other = serve(tmp_path), serve(tmp_path, default_prompt="Query: ")
    truth = served.embed(TEXTS[:2], prompt_name="query").vectors

    np.testing.assert_array_equal(served.embed(TEXTS[:2], prompt="Query: ").vectors, truth)
    np.testing.assert_array_equal(other.embed(TEXTS[:2]).vectors, truth)


@pytest.mark.parametrize("left_out", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_adapter_is_named(left_out: str, tmp_path: Path) -> None:
    build_jina_v5(tmp_path)
    assert missing_file(tmp_path) is None
    (tmp_path / "adapters" / "clustering" / left_out).unlink()

    assert missing_file(tmp_path) == f"adapters/clustering/{left_out}"
    with pytest.raises(ModelLoadFailed, match=f"clustering.*{left_out}"):
        read_layout(tmp_path)


@pytest.mark.parametrize("names", [[], ["a"], ["retrieval", "../x"], "retrieval"])
def test_task_names_that_are_no_names_are_refused(names: object, tmp_path: Path) -> None:
    build_jina_v5(tmp_path)
    edit(tmp_path / "config.json", task_names=names)

    with pytest.raises(ModelLoadFailed, match="task_names"):
        read_layout(tmp_path)


def test_weights_of_the_other_base_are_refused(tmp_path: Path, serve: Callable[..., Served]) -> None:  # noqa: F811
    build_jina_v5(tmp_path / "nano", nano=True)
    build_jina_v5(tmp_path / "small")
    shutil.copy(tmp_path / "nano" / "model.safetensors", tmp_path / "small")

    with pytest.raises(ModelLoadFailed, match=r"missing from the files|is .* in the files"):
        serve(tmp_path / "small")
