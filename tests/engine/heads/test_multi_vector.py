"""Vectors of tokens: plain, projected for late interaction, and BGE-M3's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.plain_models import CPU, END, Ids, layout_of, random_texts, run, save_headed
from tests.support.models import TOKEN_WIDTH, WIDTH
from tests.support.models.encoders import IDENTITY, TANH, write_dense

from teimgr.engine.backbone import Batching
from teimgr.engine.batching.batch import Encoded
from teimgr.engine.job import Output
from teimgr.engine.model import Model, load_model
from teimgr.errors import ModelLoadFailed
from teimgr.models.layout import M3, Backbone, Dense, LateInteraction
from teimgr.spec import Kind

CLS = 0


@pytest.fixture
def texts() -> list[Ids]:
    drawn = random_texts()
    for text in drawn:
        text[0] = CLS
    return drawn


@torch.inference_mode()
def hidden_of(theirs: torch.nn.Module, text: Ids) -> torch.Tensor:
    states: torch.Tensor = theirs(input_ids=torch.from_numpy(text.astype(np.int64))[None]).last_hidden_state[0]
    return states


def encoder(folder: Path) -> torch.nn.Module:
    from transformers import AutoModel

    return save_headed("xlm_roberta", AutoModel, folder)  # type: ignore[no-any-return]


def load(folder: Path, kind: Kind, **parts: object) -> Model:
    model = load_model(layout_of(folder, Backbone.ENCODER, kind, position_offset=2, **parts), CPU)
    model.backbone.use(Batching.BY_RUN)
    return model


def test_token_vectors_are_the_last_hidden_states(tmp_path: Path, texts: list[Ids]) -> None:
    theirs = encoder(tmp_path)
    model = load(tmp_path, Kind.EMBEDDING)

    assert model.widths == {Output.DENSE: WIDTH, Output.TOKENS: WIDTH}
    for text, rows in zip(texts, run(model, texts, Output.TOKENS), strict=True):
        np.testing.assert_allclose(rows, hidden_of(theirs, text), atol=2e-5)


def late(folder: Path, **changes: object) -> LateInteraction:
    torch.manual_seed(1)
    write_dense(folder / "1_Dense", WIDTH, TOKEN_WIDTH, TANH, bias=False)
    write_dense(folder / "2_Dense", TOKEN_WIDTH, 8, IDENTITY)
    first = Dense(folder / "1_Dense", WIDTH, TOKEN_WIDTH, False, TANH)
    second = Dense(folder / "2_Dense", TOKEN_WIDTH, 8, True, IDENTITY)
    settings: dict[str, object] = {"query_length": None, "document_length": None} | changes
    return LateInteraction(projections=(first, second), **settings)  # type: ignore[arg-type]


def projected(folder: Path, hidden: torch.Tensor) -> torch.Tensor:
    from safetensors.torch import load_file

    first, second = (load_file(folder / name / "model.safetensors") for name in ("1_Dense", "2_Dense"))
    return torch.tanh(hidden @ first["linear.weight"].T) @ second["linear.weight"].T + second["linear.bias"]


@pytest.mark.parametrize("normalize", [True, False])
def test_every_token_is_projected(normalize: bool, tmp_path: Path, texts: list[Ids]) -> None:
    theirs = encoder(tmp_path)
    model = load(tmp_path, Kind.MULTI_VECTOR, late=late(tmp_path, normalize=normalize))

    assert model.widths == {Output.MULTI_VECTOR: 8, Output.TOKENS: WIDTH}
    for text, rows in zip(texts, run(model, texts, Output.MULTI_VECTOR), strict=True):
        wanted = projected(tmp_path, hidden_of(theirs, text))
        if normalize:
            wanted = torch.nn.functional.normalize(wanted, dim=-1)
        np.testing.assert_allclose(rows, wanted, atol=2e-5)


@pytest.mark.parametrize("in_queries", [True, False])
def test_skipped_tokens_have_no_vector_in_documents(in_queries: bool, tmp_path: Path, texts: list[Ids]) -> None:
    theirs = encoder(tmp_path)
    skipped = tuple(range(5, 60))
    texts.append(np.array([6, 7], dtype=np.int32))  # nothing of it is kept
    model = load(tmp_path, Kind.MULTI_VECTOR, late=late(tmp_path, skip_ids=skipped, skip_in_queries=in_queries))
    roles = [index % 2 == 0 for index in range(len(texts))]
    asked = [Encoded(text, query=query) for text, query in zip(texts, roles, strict=True)]

    for text, query, rows in zip(texts, roles, run(model, asked, Output.MULTI_VECTOR), strict=True):
        kept = ~np.isin(text, skipped) | (query and not in_queries)
        wanted = torch.nn.functional.normalize(projected(tmp_path, hidden_of(theirs, text)), dim=-1)
        np.testing.assert_allclose(rows, wanted[torch.from_numpy(kept)], atol=2e-5)


def test_bge_m3_gives_three_outputs_of_one_forward(tmp_path: Path, texts: list[Ids]) -> None:
    theirs = encoder(tmp_path)
    torch.manual_seed(2)
    sparse, vectors = torch.nn.Linear(WIDTH, 1), torch.nn.Linear(WIDTH, 12)
    torch.save(sparse.state_dict(), tmp_path / "sparse_linear.pt")
    torch.save(vectors.half().state_dict(), tmp_path / "colbert_linear.pt")
    texts[3][5:20] = texts[3][4]  # a word again and again
    m3 = M3(tmp_path / "sparse_linear.pt", tmp_path / "colbert_linear.pt", (CLS, END, 1, 3))
    model = load(tmp_path, Kind.EMBEDDING, m3=m3, config={"vocab_size": 120})

    assert model.widths == {Output.DENSE: 32, Output.TOKENS: 32, Output.SPARSE: 120, Output.MULTI_VECTOR: 12}
    sparse.requires_grad_(False), vectors.float().requires_grad_(False)
    found = zip(texts, run(model, texts, Output.SPARSE), run(model, texts, Output.MULTI_VECTOR), strict=True)
    for text, (indices, values), rows in found:
        hidden = hidden_of(theirs, text)
        wanted: dict[int, float] = {}
        for token, weight in zip(text.tolist(), sparse(hidden).relu().flatten().tolist(), strict=True):
            if token not in m3.unused_ids and weight > 0:
                wanted[token] = max(weight, wanted.get(token, 0.0))
        assert indices.tolist() == sorted(wanted)
        np.testing.assert_allclose(values, [wanted[token] for token in sorted(wanted)], atol=1e-5)
        np.testing.assert_allclose(rows, torch.nn.functional.normalize(vectors(hidden[1:]), dim=-1), atol=2e-5)


def test_a_file_that_is_no_linear_layer_is_refused(tmp_path: Path) -> None:
    encoder(tmp_path)
    (tmp_path / "sparse_linear.pt").write_bytes(b"nothing of torch's")
    m3 = M3(tmp_path / "sparse_linear.pt", tmp_path / "sparse_linear.pt", ())

    with pytest.raises(ModelLoadFailed, match=r"sparse_linear.pt holds no linear layer"):
        load(tmp_path, Kind.EMBEDDING, m3=m3, config={"vocab_size": 120})
