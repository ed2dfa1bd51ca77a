"""castorini/monot5 and unicamp-dl's mT5: encoder-decoders as rerankers, and their scores by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from teimgr.engine.job import Input, Pair

from .families import widened
from .files import pad_and_truncate
from .vocabularies import unigram

_WORDS = {"t5": ("▁true", "▁false"), "mt5": ("▁yes", "▁no")}
_CARDS = {"t5": "castorini/monot5-base-msmarco", "mt5": "unicamp-dl/mt5-base-mmarco-v2"}
_LONGEST = 96


def build_monot5(folder: Path, kind: str = "t5") -> Path:
    torch.manual_seed(0)
    tokenizer = unigram(None)()
    tokenizer.add_tokens(list(_WORDS[kind]))
    tokenizer.model_max_length = _LONGEST
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "initializer_factor": 1.0}
    ids = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config: Any = transformers.T5Config if kind == "t5" else transformers.MT5Config
    model = transformers.AutoModelForSeq2SeqLM.from_config(config(vocab_size=len(tokenizer), **shape, **ids))
    widened(model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pad_and_truncate(folder / "tokenizer.json")
    (folder / "README.md").write_text(f"---\nlicense: apache-2.0\n---\n# {_CARDS[kind]}\n")
    return folder


def monot5_scores(folder: Path, pairs: Sequence[Input], kind: str = "t5") -> list[np.ndarray]:
    """The probability of "true" against "false" as the first token, of one pair at a time: as mteb's MonoT5Reranker."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    yes, no = tokenizer.convert_tokens_to_ids(list(_WORDS[kind]))
    found = []
    with torch.inference_mode():
        for pair in pairs:
            assert isinstance(pair, Pair)
            text = f"Query: {pair.first} Document: {pair.second} Relevant:"
            given = tokenizer(text, truncation=True, max_length=_LONGEST, return_tensors="pt")
            start = torch.tensor([[model.config.decoder_start_token_id]])
            given.pop("token_type_ids", None)
            logits = model(**given, decoder_input_ids=start).logits[0, 0]
            found.append(logits[[no, yes]].softmax(-1)[1:].numpy())
    return found
