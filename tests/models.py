"""Tiny models with random weights, written to a directory exactly as sentence-transformers would find them.

Two layers, width 32, a tokenizer trained on a paragraph: everything about them is small but the file layout.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import models as token_models

WIDTH = 32
MAX_LENGTH = 96

CORPUS = (
    "The quick brown fox jumps over the lazy dog while seven wizards mix a potion of zinc and jade.",
    "An embedding is a point in space: texts that mean the same lie near one another, whatever their words.",
    "Rain fell on the harbour all night; by morning the boats lay in fog, their lamps still lit.",
    "def add(a, b): return a + b  # 1234567890 !?()[]{}<>@&%$",
    "Zürich, Łódź and São Paulo are cities; 东京 and 北京 are too. Καλημέρα κόσμε, привет мир.",
    "How long does a query wait while a bulk job runs? Not longer than one small batch.",
)

# Lengths from one token to past the limit, several of them equal.
TEXTS = (
    "fog",
    "dog",
    "The quick brown fox",
    "An embedding is a point in space: texts that mean the same lie near one another.",
    "Zürich, Łódź and São Paulo are cities; 东京 and 北京 are too.",
    "How long does a query wait while a bulk job runs?",
    "rain " * 30,
    "The lazy dog sleeps while the boats lie in fog and the lamps are still lit. " * 9,
    "a b c",
    "x y z",
)


@dataclass(frozen=True)
class Family:
    """How one architecture is made: its tokenizer, and its model from the vocabulary's size."""

    tokenizer: Callable[[], transformers.PreTrainedTokenizerFast]
    model: Callable[[int], transformers.PreTrainedModel]
    pooling: str = "mean"


def build(
    family: str,
    folder: Path,
    *,
    pooling: str | None = None,
    include_prompt: bool = True,
    dense: tuple[int, str] | None = None,
    prompts: dict[str, str] | None = None,
    default_prompt_name: str | None = None,
    max_length: int = MAX_LENGTH,
    seed: int = 0,
) -> Path:
    """Write a model of `family` to `folder`, and give `folder` back.

    `pooling` is a name of sentence-transformers ("mean", "cls", "lasttoken", "max", "weightedmean", …); `dense` is
    the output width and the activation's dotted name of a Dense module.
    """
    torch.manual_seed(seed)
    kind = FAMILIES[family]
    tokenizer = kind.tokenizer()
    kind.model(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _pad_and_truncate(folder / "tokenizer.json")
    modules = ["Transformer", "Pooling"]
    _write(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    _write(folder / "1_Pooling" / "config.json", _pooling(pooling or kind.pooling, include_prompt))
    if dense is not None:
        _write_dense(folder / "2_Dense", *dense)
        modules.append("Dense")
    modules.append("Normalize")
    _write(folder / "modules.json", [_module(i, name) for i, name in enumerate(modules)])
    saved = {"prompts": prompts or {}, "default_prompt_name": default_prompt_name}
    _write(folder / "config_sentence_transformers.json", saved)
    return folder


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | changes
    _write(path, {key: value for key, value in content.items() if value is not None})


def _module(index: int, name: str) -> dict[str, Any]:
    path = "" if index == 0 else f"{index}_{name}"
    return {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}


def _pooling(name: str, include_prompt: bool) -> dict[str, Any]:
    keys = {
        "cls": "pooling_mode_cls_token",
        "max": "pooling_mode_max_tokens",
        "mean": "pooling_mode_mean_tokens",
        "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
        "weightedmean": "pooling_mode_weightedmean_tokens",
        "lasttoken": "pooling_mode_lasttoken",
    }
    chosen = name.split("+")
    flags = {key: mode in chosen for mode, key in keys.items()}
    return {"word_embedding_dimension": WIDTH, **flags, "include_prompt": include_prompt}


def _write_dense(folder: Path, width: int, activation: str) -> None:
    config = {"in_features": WIDTH, "out_features": width, "bias": True, "activation_function": activation}
    _write(folder / "config.json", config)
    save_file(
        {"linear.weight": torch.randn(width, WIDTH), "linear.bias": torch.randn(width)}, folder / "model.safetensors"
    )


def _pad_and_truncate(path: Path) -> None:
    """Real files carry settings of the training; an engine must not obey them."""
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": content["added_tokens"][0]["content"],
    }
    _write(path, content)


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False))


# Tokenizers.


def _word_piece() -> transformers.PreTrainedTokenizerFast:
    tokenizer = Tokenizer(token_models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=specials))
    _frame(tokenizer, "[CLS]", "[SEP]")
    return _wrapped(tokenizer, pad="[PAD]", unk="[UNK]", cls="[CLS]", sep="[SEP]", mask="[MASK]")


def _byte_level(framed: bool) -> Callable[[], transformers.PreTrainedTokenizerFast]:
    """Byte-level BPE; `framed` as RoBERTa has it, else only an end token as Qwen's embedding models have it."""

    def make() -> transformers.PreTrainedTokenizerFast:
        tokenizer = Tokenizer(token_models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        tokenizer.train_from_iterator(CORPUS, trainer)
        _frame(tokenizer, "<s>" if framed else None, "</s>")
        return _wrapped(tokenizer, pad="<pad>", unk="<unk>", cls="<s>", sep="</s>", mask="<mask>")

    return make


def _unigram(begin: str | None) -> Callable[[], transformers.PreTrainedTokenizerFast]:
    def make() -> transformers.PreTrainedTokenizerFast:
        tokenizer = Tokenizer(token_models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=specials, unk_token="<unk>")
        tokenizer.train_from_iterator(CORPUS, trainer)
        _frame(tokenizer, begin, "</s>")
        return _wrapped(tokenizer, pad="<pad>", unk="<unk>", cls="<s>", sep="</s>", mask="<mask>")

    return make


def _frame(tokenizer: Tokenizer, begin: str | None, end: str) -> None:
    tokens = [token for token in (begin, end) if token is not None]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join([*([begin] if begin else []), "$A", end]),
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in tokens],
    )


def _wrapped(
    tokenizer: Tokenizer, *, pad: str, unk: str, cls: str, sep: str, mask: str
) -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        unk_token=unk,
        cls_token=cls,
        sep_token=sep,
        mask_token=mask,
        model_max_length=512,
    )


# Models. The weights are drawn wide, so that attention and positions matter to the result.

_SHAPE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.2,
}


def _bert(vocabulary: int) -> transformers.PreTrainedModel:
    config = transformers.BertConfig(vocab_size=vocabulary, max_position_embeddings=128, pad_token_id=0, **_SHAPE)
    return transformers.BertModel(config, add_pooling_layer=False)


def _roberta(vocabulary: int) -> transformers.PreTrainedModel:
    config = transformers.RobertaConfig(vocab_size=vocabulary, max_position_embeddings=130, pad_token_id=1, **_SHAPE)
    return transformers.RobertaModel(config, add_pooling_layer=False)


def _xlm_roberta(vocabulary: int) -> transformers.PreTrainedModel:
    config = transformers.XLMRobertaConfig(vocab_size=vocabulary, max_position_embeddings=130, pad_token_id=1, **_SHAPE)
    return transformers.XLMRobertaModel(config, add_pooling_layer=False)


def _distilbert(vocabulary: int) -> transformers.PreTrainedModel:
    config = transformers.DistilBertConfig(
        vocab_size=vocabulary,
        max_position_embeddings=128,
        dim=WIDTH,
        n_layers=2,
        n_heads=4,
        hidden_dim=64,
        initializer_range=0.2,
    )
    return transformers.DistilBertModel(config)


def _modernbert(vocabulary: int) -> transformers.PreTrainedModel:
    config = transformers.ModernBertConfig(
        vocab_size=vocabulary,
        max_position_embeddings=128,
        local_attention=16,
        global_attn_every_n_layers=2,
        pad_token_id=1,
        cls_token_id=0,
        sep_token_id=2,
        bos_token_id=0,
        eos_token_id=2,
        **_SHAPE,
    )
    return transformers.ModernBertModel(config)


def _mpnet(vocabulary: int) -> transformers.PreTrainedModel:
    config = transformers.MPNetConfig(vocab_size=vocabulary, max_position_embeddings=130, pad_token_id=1, **_SHAPE)
    return transformers.MPNetModel(config, add_pooling_layer=False)


def _t5(vocabulary: int) -> transformers.PreTrainedModel:
    config = transformers.T5Config(
        vocab_size=vocabulary,
        d_model=WIDTH,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        initializer_factor=2.0,
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return transformers.T5EncoderModel(config)


def _qwen3(vocabulary: int) -> transformers.PreTrainedModel:
    config = transformers.Qwen3Config(
        vocab_size=vocabulary,
        max_position_embeddings=128,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        **_SHAPE,
    )
    return transformers.Qwen3Model(config)


FAMILIES = {
    "bert": Family(_word_piece, _bert),
    "distilbert": Family(_word_piece, _distilbert),
    "modernbert": Family(_byte_level(framed=True), _modernbert, "cls"),
    "mpnet": Family(_byte_level(framed=True), _mpnet),
    "qwen3": Family(_byte_level(framed=False), _qwen3, "lasttoken"),
    "roberta": Family(_byte_level(framed=True), _roberta),
    "t5": Family(_unigram(None), _t5),
    "xlm_roberta": Family(_unigram("<s>"), _xlm_roberta, "cls"),
}
