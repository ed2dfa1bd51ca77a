"""References of the catalogue beside those of `tests.fidelity.references`: plain forwards, and bare transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tests.fidelity import references
from tests.fidelity.figures import Matrix
from tests.support.plain_forwards import POOLINGS
from tokenizers import Tokenizer
from torch import Tensor

from bench.families.row import Reference
from teimgr.engine.job import Input, Pair

st_dense: Reference = partial(references.dense, batch_size=1)


def dense_by_task(folder: Path, texts: Sequence[Input], task: str, *, trusted: bool = False) -> list[Matrix]:
    """sentence-transformers with the route of a task, one text at a time."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", trust_remote_code=trusted)
    encode = model.encode_query if task == "query" else model.encode_document
    found = encode(list(texts), normalize_embeddings=True, show_progress_bar=False, batch_size=1)
    return [np.asarray(row)[None, :] for row in found]


def plain(
    forward: Callable[[Tensor], Tensor],
    pooling: str,
    longest: int,
    *,
    end: str | None = None,
    prompt: str = "",
    project: Callable[[Tensor], Tensor] = lambda vector: vector,
) -> Reference:
    """The vectors of `forward`, which gives the hidden states of one text's ids; `end` is a token put behind a text."""

    def vectors(folder: Path, texts: Sequence[Input]) -> list[Matrix]:
        tokenizer = _tokenizer(folder, longest - (end is not None))
        closing = [] if end is None else [tokenizer.token_to_id(end)]
        found = []
        with torch.inference_mode():
            for text in texts:
                ids = tokenizer.encode(prompt + str(text)).ids + closing
                found.append(project(POOLINGS[pooling](forward(torch.tensor(ids)))).numpy()[None])
        return found

    return vectors


def plain_scores(score: Callable[[Tensor, Tensor], Tensor], longest: int) -> Reference:
    """The logits of `score` for the ids and types of a pair."""

    def scores(folder: Path, pairs: Sequence[Input]) -> list[Matrix]:
        tokenizer = _tokenizer(folder, longest)
        found = []
        with torch.inference_mode():
            for pair in pairs:
                assert isinstance(pair, Pair)
                encoding = tokenizer.encode(pair.first, pair.second)
                found.append(score(torch.tensor(encoding.ids), torch.tensor(encoding.type_ids)).numpy())
        return found

    return scores


def bare(pooling: str, longest: int) -> Reference:
    """transformers' AutoModel, one text at a time, then `pooling`."""

    def vectors(folder: Path, texts: Sequence[Input]) -> list[Matrix]:
        from transformers import AutoModel, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        found = []
        with torch.inference_mode():
            for text in texts:
                encoded = tokenizer(text, truncation=True, max_length=longest, return_tensors="pt")
                found.append(POOLINGS[pooling](model(**encoded).last_hidden_state[0]).numpy()[None])
        return found

    return vectors


def elsewhere(other: str, reference: Reference) -> Reference:
    """`reference` on another folder beside the model's: the same model in a layout that the library reads."""

    def found(folder: Path, inputs: Sequence[Input]) -> list[Matrix]:
        return reference(folder.parent / other, inputs)

    return found


def none(folder: Path, inputs: Sequence[Input]) -> list[Matrix]:
    """No reference: the row is refused."""
    raise NotImplementedError("there is no reference for a model that is refused")


def token_ids(folder: Path, text: str, longest: int) -> Tensor:
    """The ids of a text by the tokenizer in `folder`."""
    return torch.tensor(_tokenizer(folder, longest).encode(text).ids)


def _tokenizer(folder: Path, longest: int) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(longest)
    return tokenizer
