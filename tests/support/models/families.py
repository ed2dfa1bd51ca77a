"""The architectures: two layers, width 32, weights drawn wide, so that attention and positions matter to the result."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tests.support.models.files import Wrapped, byte_level, qwen, unigram, word_piece

WIDTH = 32
MAX_LENGTH = 96

SHAPE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.2,
}
_DECODER: dict[str, Any] = {**SHAPE, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
_ROBERTA_IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}

Config = Callable[[int], transformers.PreTrainedConfig]


@dataclass(frozen=True)
class Family:
    """How one architecture is made: its tokenizer, and its configuration from the vocabulary's size."""

    tokenizer: Callable[[], Wrapped]
    config: Config
    pooling: str = "mean"

    def encoder(self, vocabulary: int) -> transformers.PreTrainedModel:
        """The bare model, without BERT's pooler, as embedding checkpoints have it."""
        config = self.config(vocabulary)
        if config.model_type == "t5":
            return transformers.T5EncoderModel(config)
        kind = transformers.AutoModel._model_mapping[type(config)]
        pooler = {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(kind).parameters else {}
        return widened(kind(config, **pooler))

    def headed(self, auto: Any, vocabulary: int, **settings: Any) -> transformers.PreTrainedModel:
        """The model with the head of an Auto class (AutoModelForMaskedLM, …); `settings` go to its configuration."""
        config = self.config(vocabulary)
        for name, value in settings.items():
            setattr(config, name, value)
        return widened(auto.from_config(config))


def widened(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Biases and norms off their zeros and ones, where a head that forgot them would go unnoticed."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and ("bias" in name or "norm" in name.lower()):
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def _bert(vocabulary: int) -> transformers.PreTrainedConfig:
    return transformers.BertConfig(vocab_size=vocabulary, max_position_embeddings=128, pad_token_id=0, **SHAPE)


def _albert(vocabulary: int) -> transformers.PreTrainedConfig:
    return transformers.AlbertConfig(
        vocab_size=vocabulary, embedding_size=16, max_position_embeddings=128, pad_token_id=0, **SHAPE
    )


def _electra(vocabulary: int) -> transformers.PreTrainedConfig:
    return transformers.ElectraConfig(
        vocab_size=vocabulary, embedding_size=16, max_position_embeddings=128, pad_token_id=0, **SHAPE
    )


def _deberta_v2(vocabulary: int) -> transformers.PreTrainedConfig:
    return transformers.DebertaV2Config(
        vocab_size=vocabulary,
        max_position_embeddings=128,
        relative_attention=True,
        position_buckets=16,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type="p2c|c2p",
        position_biased_input=False,
        type_vocab_size=0,
        pad_token_id=1,
        pooler_hidden_size=WIDTH,
        **SHAPE,
    )


def _roberta(vocabulary: int) -> transformers.PreTrainedConfig:
    return transformers.RobertaConfig(
        vocab_size=vocabulary, max_position_embeddings=130, type_vocab_size=1, **_ROBERTA_IDS, **SHAPE
    )


def _xlm_roberta(vocabulary: int) -> transformers.PreTrainedConfig:
    return transformers.XLMRobertaConfig(
        vocab_size=vocabulary, max_position_embeddings=130, type_vocab_size=1, **_ROBERTA_IDS, **SHAPE
    )


def _camembert(vocabulary: int) -> transformers.PreTrainedConfig:
    return transformers.CamembertConfig(
        vocab_size=vocabulary, max_position_embeddings=130, type_vocab_size=1, **_ROBERTA_IDS, **SHAPE
    )


def _distilbert(vocabulary: int) -> transformers.PreTrainedConfig:
    return transformers.DistilBertConfig(
        vocab_size=vocabulary,
        max_position_embeddings=128,
        dim=WIDTH,
        n_layers=2,
        n_heads=4,
        hidden_dim=64,
        initializer_range=0.2,
    )


def _modernbert(vocabulary: int) -> transformers.PreTrainedConfig:
    return transformers.ModernBertConfig(
        vocab_size=vocabulary,
        max_position_embeddings=128,
        local_attention=16,
        global_attn_every_n_layers=2,
        cls_token_id=0,
        sep_token_id=2,
        **_ROBERTA_IDS,
        **SHAPE,
    )


def _mpnet(vocabulary: int) -> transformers.PreTrainedConfig:
    return transformers.MPNetConfig(vocab_size=vocabulary, max_position_embeddings=130, pad_token_id=1, **SHAPE)


def _nomic_bert(vocabulary: int) -> transformers.PreTrainedConfig:
    return transformers.NomicBertConfig(vocab_size=vocabulary, max_position_embeddings=128, **SHAPE)


def _gte(vocabulary: int) -> transformers.PreTrainedConfig:
    return transformers.GteConfig(vocab_size=vocabulary, max_position_embeddings=128, pad_token_id=1, **SHAPE)


def _jina_v3(vocabulary: int) -> transformers.PreTrainedConfig:
    return transformers.JinaEmbeddingsV3Config(
        vocab_size=vocabulary, max_position_embeddings=128, **_ROBERTA_IDS, **SHAPE
    )


def _eurobert(vocabulary: int) -> transformers.PreTrainedConfig:
    return transformers.EuroBertConfig(vocab_size=vocabulary, mask_token_id=4, **_ROBERTA_IDS, **_DECODER)


def _t5(vocabulary: int) -> transformers.PreTrainedConfig:
    return transformers.T5Config(
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


def _qwen3(vocabulary: int) -> transformers.PreTrainedConfig:
    return transformers.Qwen3Config(vocab_size=vocabulary, **_ROBERTA_IDS, **_DECODER)


def _qwen2(vocabulary: int) -> transformers.PreTrainedConfig:
    return transformers.Qwen2Config(vocab_size=vocabulary, **_ROBERTA_IDS, **_DECODER)


def _llama(vocabulary: int) -> transformers.PreTrainedConfig:
    return transformers.LlamaConfig(vocab_size=vocabulary, **_ROBERTA_IDS, **_DECODER)


def _mistral(vocabulary: int) -> transformers.PreTrainedConfig:
    return transformers.MistralConfig(vocab_size=vocabulary, sliding_window=12, **_ROBERTA_IDS, **_DECODER)


def _gemma3(vocabulary: int) -> transformers.PreTrainedConfig:
    """As EmbeddingGemma: every token sees every other, in the sliding layers those near it."""
    return transformers.Gemma3TextConfig(
        vocab_size=vocabulary,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=8,
        use_bidirectional_attention=True,
        **_ROBERTA_IDS,
        **_DECODER,
    )


_DEBERTA = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]

FAMILIES = {
    "albert": Family(word_piece(), _albert),
    "bert": Family(word_piece(), _bert),
    "camembert": Family(unigram("<s>"), _camembert),
    "deberta_v2": Family(unigram("[CLS]", _DEBERTA), _deberta_v2),
    "distilbert": Family(word_piece(typed=False), _distilbert),
    "electra": Family(word_piece(), _electra),
    "eurobert": Family(byte_level(framed=True), _eurobert),
    "gemma3": Family(unigram("<s>"), _gemma3),
    "gte": Family(unigram("<s>"), _gte, "cls"),
    "jina_v3": Family(unigram("<s>"), _jina_v3),
    "llama": Family(byte_level(framed=False), _llama, "lasttoken"),
    "mistral": Family(byte_level(framed=False), _mistral, "lasttoken"),
    "modernbert": Family(byte_level(framed=True), _modernbert, "cls"),
    "mpnet": Family(byte_level(framed=True), _mpnet),
    "nomic_bert": Family(word_piece(), _nomic_bert),
    "qwen2": Family(qwen, _qwen2, "lasttoken"),
    "qwen3": Family(byte_level(framed=False), _qwen3, "lasttoken"),
    "roberta": Family(byte_level(framed=True), _roberta),
    "t5": Family(unigram(None), _t5),
    "xlm_roberta": Family(unigram("<s>"), _xlm_roberta, "cls"),
}
