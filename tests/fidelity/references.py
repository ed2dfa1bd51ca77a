"""Results of the libraries that the models were made with, one text at a time or in their own batches, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from teimgr.engine.job import Input, Pair
from tests.fidelity.figures import Matrix

_QUIET: dict[str, Any] = {"show_progress_bar": False}


def dense(path: Path, texts: Sequence[Input], *, trusted: bool = False, **options: Any) -> list[Matrix]:
    """sentence-transformers' `SentenceTransformer.encode`; `trusted`: the model's own code runs."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(path), device="cpu", trust_remote_code=trusted)
    vectors = model.encode(list(texts), **_QUIET, **options)
    return [row[None, :] for row in np.asarray(vectors)]


def tokens(path: Path, texts: Sequence[Input]) -> list[Matrix]:
    """The last hidden state of every token, of one text at a time, through transformers."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(path), device="cpu")
    found = model.encode(list(texts), output_value="token_embeddings", batch_size=1, **_QUIET)
    return [np.asarray(rows) for rows in found]


def sparse(path: Path, texts: Sequence[Input]) -> list[Matrix]:
    """sentence-transformers' `SparseEncoder.encode`, zeros included."""
    from sentence_transformers import SparseEncoder

    weights = SparseEncoder(str(path), device="cpu").encode(list(texts), convert_to_sparse_tensor=False, **_QUIET)
    return [np.asarray(row)[None, :] for row in weights]


def multi_vector(path: Path, texts: Sequence[Input], role: str) -> list[Matrix]:
    """sentence-transformers' `MultiVectorEncoder`, as `role` "query" or "document"."""
    from sentence_transformers import MultiVectorEncoder

    model = MultiVectorEncoder(str(path), device="cpu")
    encode = model.encode_query if role == "query" else model.encode_document
    return [np.asarray(rows) for rows in encode(list(texts), convert_to_numpy=True, **_QUIET)]


def scores(path: Path, pairs: Sequence[Input], **options: Any) -> list[Matrix]:
    """sentence-transformers' `CrossEncoder.predict`, through the activation of the model's own files."""
    from sentence_transformers import CrossEncoder

    asked = [[pair.first, pair.second] for pair in pairs if isinstance(pair, Pair)]
    found = np.asarray(CrossEncoder(str(path), device="cpu").predict(asked, **_QUIET, **options))
    return list(found.reshape(len(asked), -1))


def classes(path: Path, inputs: Sequence[Input], activation: str) -> list[Matrix]:
    """transformers' sequence classification, one input at a time, then `activation`."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    limit = min(tokenizer.model_max_length, 96)
    shape = {"sigmoid": torch.sigmoid, "softmax": lambda row: row.softmax(-1), "identity": lambda row: row}[activation]
    found = []
    with torch.inference_mode():
        for item in inputs:
            texts = tuple(item) if isinstance(item, Pair) else (item,)
            encoded = tokenizer(*texts, truncation=True, max_length=limit, return_tensors="pt")
            found.append(shape(model(**encoded).logits[0].float()).numpy())
    return found


def token_classes(path: Path, texts: Sequence[Input]) -> list[Matrix]:
    """The logits of every token by transformers' token classification, one text at a time."""
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32).eval()
    limit = min(tokenizer.model_max_length, 96)
    with torch.inference_mode():
        encoded = (tokenizer(text, truncation=True, max_length=limit, return_tensors="pt") for text in texts)
        return [model(**one).logits[0].numpy() for one in encoded]


def m3(path: Path, texts: Sequence[Input], part: str) -> list[Matrix]:
    """BGE-M3's sparse weights or token vectors, by the definition of FlagEmbedding's `BGEM3FlagModel`
    (https://github.com/FlagOpen/FlagEmbedding, `inference/embedder/encoder_only/m3.py`).
    """
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    linear = torch.load(path / {"sparse": "sparse_linear.pt", "multi": "colbert_linear.pt"}[part], weights_only=True)
    unused = {tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    found = []
    with torch.inference_mode():
        for text in texts:
            encoded = tokenizer(text, truncation=True, max_length=96, return_tensors="pt")
            hidden = model(**encoded).last_hidden_state[0]
            rows = hidden @ linear["weight"].T + linear["bias"]
            if part == "multi":
                found.append(torch.nn.functional.normalize(rows[1:], dim=-1).numpy())
                continue
            weights = np.zeros((1, model.config.vocab_size), dtype=np.float32)
            for token, weight in zip(encoded.input_ids[0].tolist(), rows.relu().flatten().tolist(), strict=True):
                if token not in unused:
                    weights[0, token] = max(weights[0, token], weight)
            found.append(weights)
    return found


def qwen3_reranker(path: Path, pairs: Sequence[Input], instruction: str, max_length: int) -> list[Matrix]:
    """P(yes) by the recipe of the Qwen3-Reranker model card, one pair at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    yes, no = tokenizer.convert_tokens_to_ids("yes"), tokenizer.convert_tokens_to_ids("no")
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    before = tokenizer.encode(prefix, add_special_tokens=False)
    after = tokenizer.encode(suffix, add_special_tokens=False)
    found = []
    with torch.inference_mode():
        for pair in pairs:
            assert isinstance(pair, Pair)
            body = f"<Instruct>: {instruction}\n<Query>: {pair.first}\n<Document>: {pair.second}"
            kept = tokenizer.encode(body, add_special_tokens=False)[: max_length - len(before) - len(after)]
            logits = model(torch.tensor([before + kept + after])).logits[0, -1]
            both = torch.stack([logits[no], logits[yes]]).float().log_softmax(0)
            found.append(both[1:].exp().numpy())
    return found


def prompted_reranker(path: Path, pairs: Sequence[Input], family: str, max_length: int) -> list[Matrix]:
    """Scores before any activation by the code of the authors of mxbai-rerank-v2 ("qwen2") and bge-reranker-v2-gemma
    ("gemma"): each piece of the prompt is tokenized by itself, and `max_length` is of the whole.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    line = ids("\n")
    if family == "qwen2":
        before = ids(
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\n"
        )
        after = line + ids(
            "You are a search relevance expert who evaluates how well documents match search queries. For each "
            "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
            "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:"
        )
        after += ids("<|im_end|>\n<|im_start|>assistant\n")
        marks, (yes, no) = ("query: ", "document: "), (ids("1")[0], ids("0")[0])
    else:
        before = [tokenizer.bos_token_id]
        after = line + ids(
            "Given a query A and a passage B, determine whether the passage contains an answer to the query by "
            "providing a prediction of either 'Yes' or 'No'."
        )
        marks, (yes, no) = ("A: ", "B: "), (ids("Yes")[0], None)
    room = max_length - len(before) - len(after) - len(line)
    found = []
    with torch.inference_mode():
        for pair in pairs:
            assert isinstance(pair, Pair)
            query = ids(marks[0] + pair.first)[: room * 3 // 4]
            document = ids(marks[1] + pair.second)[: room - len(query)]
            logits = model(torch.tensor([before + query + line + document + after])).logits[0, -1].float()
            found.append((logits[yes] - (0.0 if no is None else logits[no])).reshape(1).numpy())
    return found
