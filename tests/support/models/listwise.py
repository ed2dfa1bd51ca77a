"""jina-reranker-v3, and its scores by a plain forward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.support import plain_forwards
from tests.support.models.families import FAMILIES, widened
from tests.support.models.files import chat, edit, read
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

DOCUMENT_MARK, QUERY_MARK = "<|embed_token|>", "<|rerank_token|>"
CAPACITY = 4096


def build_listwise(folder: Path, *, capacity: int = CAPACITY, seed: int = 0, **changes: Any) -> Path:
    """Write a jina-reranker-v3 as the hub has it; `changes` go into its config.json."""
    torch.manual_seed(seed)
    tokenizer = chat()
    tokenizer.add_tokens([transformers.AddedToken(mark, special=True) for mark in (DOCUMENT_MARK, QUERY_MARK)])
    tokenizer.model_max_length = capacity
    config = FAMILIES["qwen3"].config(len(tokenizer))
    for name, value in {"max_position_embeddings": capacity, "tie_word_embeddings": True}.items():
        setattr(config, name, value)
    model = widened(transformers.AutoModelForCausalLM.from_config(config))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight", None)
    hidden = int(config.hidden_size)
    weights["projector.0.weight"] = torch.randn(hidden // 2, hidden)
    weights["projector.2.weight"] = torch.randn(512, hidden // 2)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    auto = {"AutoModel": "modeling.JinaForRanking"}
    edit(folder / "config.json", **{"architectures": ["JinaForRanking"], "auto_map": auto, **changes})
    return folder


class PlainList:
    """Scores as JinaForRanking.rerank of jinaai/jina-reranker-v3 (modeling.py), one prompt at a time, in float32."""

    def __init__(self, folder: Path) -> None:
        self._weights = {
            name.removeprefix("model."): value.float()
            for name, value in load_file(folder / "model.safetensors").items()
        }
        self._config = read(folder / "config.json")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._capacity = int(read(folder / "tokenizer_config.json")["model_max_length"])
        self.prompts: list[str] = []

    def scores(self, query: str, documents: Sequence[str]) -> np.ndarray:
        """The score of each document, in their order."""
        asked, query_tokens = self._cut(query, 512)
        texts, found, queries, weights = [], [], [], []
        room = self._capacity - 2 * query_tokens
        for place, document in enumerate(documents):
            text, tokens = self._cut(document, 2048)
            texts.append(text)
            room -= tokens
            if len(texts) >= 125 or room <= 2048 or place == len(documents) - 1:
                vectors = self._vectors(self._prompt(asked, texts))
                fits = functional.cosine_similarity(vectors[:-1], vectors[-1:], dim=-1)
                found.append(vectors[:-1])
                queries.append(vectors[-1].numpy())
                weights.append(float(((1 + fits) / 2).max()))
                texts, room = [], self._capacity - 2 * query_tokens
        merged = torch.from_numpy(np.average(np.stack(queries), axis=0, weights=weights)).float()
        return functional.cosine_similarity(torch.cat(found), merged[None], dim=-1).numpy()

    def _cut(self, text: str, most: int) -> tuple[str, int]:
        ids = self._tokenizer.encode(text).ids[:most]
        return (self._tokenizer.decode(ids, skip_special_tokens=False) if len(ids) >= most else text), len(ids)

    def _prompt(self, query: str, documents: Sequence[str]) -> str:
        def clean(text: str) -> str:
            return text.replace(QUERY_MARK, "").replace(DOCUMENT_MARK, "")

        passages = "\n".join(
            f'<passage id="{place}">\n{clean(document)}{DOCUMENT_MARK}\n</passage>'
            for place, document in enumerate(documents)
        )
        self.prompts.append(
            "<|im_start|>system\n"
            "You are a search relevance expert who can determine a ranking of the passages based on how relevant they "
            "are to the query. If the query is a question, how relevant a passage is depends on how well it answers "
            "the question. If not, try to analyze the intent of the query and assess how well each passage satisfies "
            "the intent. If an instruction is provided, you should follow the instruction when determining the "
            "ranking.<|im_end|>\n<|im_start|>user\n"
            f"I will provide you with {len(documents)} passages, each indicated by a numerical identifier. Rank the "
            f"passages based on their relevance to query: {clean(query)}\n{passages}\n"
            f"<query>\n{clean(query)}{QUERY_MARK}\n</query><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        return self.prompts[-1]

    def _vectors(self, prompt: str) -> Tensor:
        """The projected hidden states of the documents' marks and, last, of the query's."""
        ids = torch.tensor(self._tokenizer.encode(prompt).ids)
        marks = [self._tokenizer.token_to_id(mark) for mark in (DOCUMENT_MARK, QUERY_MARK)]
        with torch.inference_mode():
            hidden = plain_forwards.causal(self._weights, self._config, ids, both_ways=False)
            at_marks = torch.cat([hidden[ids == mark] for mark in marks])
            inner = functional.relu(at_marks @ self._weights["projector.0.weight"].T)
            return inner @ self._weights["projector.2.weight"].T
