"""Further architectures of the catalogue in `bench/families`, made as those of `families`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import transformers
from tests.support.models.families import FAMILIES, MAX_LENGTH, SHAPE, WIDTH, Family
from tests.support.models.files import byte_level, qwen, unigram, word_piece

_DECODER: dict[str, Any] = {**SHAPE, "num_key_value_heads": 2, "max_position_embeddings": 256}
_HEADS: dict[str, Any] = {**_DECODER, "head_dim": 8}
_BERT: dict[str, Any] = {**SHAPE, "max_position_embeddings": 128, "pad_token_id": 0}
_IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_GEMMA = {"query_pre_attn_scalar": 8, "sliding_window": 16}
_T5: dict[str, Any] = {
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "initializer_factor": 2.0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}


def _of(kind: str, **settings: Any) -> Callable[[int], transformers.PreTrainedConfig]:
    """A configuration of the class `kind` of transformers for a vocabulary."""

    def make(vocabulary: int) -> transformers.PreTrainedConfig:
        config: transformers.PreTrainedConfig = getattr(transformers, kind)(vocab_size=vocabulary, **settings)
        return config

    return make


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}

FURTHER = {
    "bart": Family(
        byte_level(framed=True),
        _of(
            "BartConfig",
            d_model=WIDTH,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=128,
            init_std=0.2,
            **_IDS,
        ),
    ),
    "bert_unigram": Family(unigram("<s>"), _of("BertConfig", **_BERT | {"pad_token_id": 1})),
    "big_bird": Family(
        unigram("[CLS]", ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]),
        _of("BigBirdConfig", attention_type="original_full", **_BERT | _IDS),
    ),
    "bloom": Family(
        byte_level(framed=False),
        _of("BloomConfig", hidden_size=WIDTH, n_layer=2, n_head=4, initializer_range=0.2, **_IDS),
        "weightedmean",
    ),
    "convbert": Family(word_piece(), _of("ConvBertConfig", embedding_size=WIDTH, conv_kernel_size=3, **_BERT)),
    "data2vec_text": Family(
        byte_level(framed=True), _of("Data2VecTextConfig", max_position_embeddings=130, **_IDS, **SHAPE)
    ),
    "deberta": Family(
        byte_level(framed=True),
        _of(
            "DebertaConfig",
            relative_attention=True,
            max_relative_positions=64,
            pos_att_type="c2p|p2c",
            position_biased_input=False,
            type_vocab_size=0,
            pooler_hidden_size=WIDTH,
            **_BERT | {"pad_token_id": 1},
        ),
    ),
    "ernie": Family(word_piece(), _of("ErnieConfig", task_type_vocab_size=3, use_task_id=False, **_BERT)),
    "esm": Family(
        word_piece(), _of("EsmConfig", position_embedding_type="rotary", mask_token_id=4, **_BERT | {"pad_token_id": 1})
    ),
    "flaubert": Family(
        word_piece(typed=False),
        _of("FlaubertConfig", emb_dim=WIDTH, n_layers=2, n_heads=4, max_position_embeddings=128, pad_index=0),
    ),
    "gemma": Family(unigram("<s>"), _of("GemmaConfig", **_IDS, **_HEADS), "lasttoken"),
    "gemma2": Family(unigram("<s>"), _of("Gemma2Config", **_ALTERNATING, **_GEMMA, **_IDS, **_HEADS), "lasttoken"),
    "gemma3_causal": Family(
        unigram("<s>"), _of("Gemma3TextConfig", **_ALTERNATING, **_GEMMA, **_IDS, **_HEADS), "lasttoken"
    ),
    "gpt2": Family(
        byte_level(framed=False),
        _of("GPT2Config", n_embd=WIDTH, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2, **_IDS),
        "lasttoken",
    ),
    "gpt_oss": Family(
        byte_level(framed=False),
        _of("GptOssConfig", num_local_experts=4, num_experts_per_tok=2, **_ALTERNATING, **_GEMMA, **_IDS, **_HEADS),
        "lasttoken",
    ),
    "granite_hybrid": Family(
        byte_level(framed=False),
        _of(
            "GraniteMoeHybridConfig",
            layer_types=["mamba", "attention"],
            mamba_n_heads=8,
            mamba_d_head=8,
            mamba_d_state=8,
            mamba_chunk_size=16,
            num_local_experts=0,
            shared_intermediate_size=64,
            **_IDS,
            **_DECODER,
        ),
        "lasttoken",
    ),
    "gpt_neo": Family(
        byte_level(framed=False),
        _of(
            "GPTNeoConfig",
            hidden_size=WIDTH,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=16,
            max_position_embeddings=256,
            initializer_range=0.2,
            **_IDS,
        ),
        "weightedmean",
    ),
    "gpt_neox": Family(
        byte_level(framed=False), _of("GPTNeoXConfig", max_position_embeddings=256, **_IDS, **SHAPE), "lasttoken"
    ),
    "gptj": Family(
        byte_level(framed=False),
        _of(
            "GPTJConfig",
            n_embd=WIDTH,
            n_layer=2,
            n_head=4,
            n_positions=256,
            rotary_dim=4,
            initializer_range=0.2,
            **_IDS,
        ),
        "weightedmean",
    ),
    "granite": Family(
        byte_level(framed=False),
        _of(
            "GraniteConfig",
            embedding_multiplier=3.0,
            residual_multiplier=0.5,
            attention_multiplier=0.2,
            **_IDS,
            **_DECODER,
        ),
        "lasttoken",
    ),
    "ibert": Family(byte_level(framed=True), _of("IBertConfig", max_position_embeddings=130, **_IDS, **SHAPE)),
    "lfm2": Family(
        byte_level(framed=True),
        _of(
            "Lfm2Config",
            block_auto_adjust_ff_dim=False,
            layer_types=["conv", "full_attention"],
            **_IDS,
            **_DECODER,
        ),
        "lasttoken",
    ),
    "llama3": Family(
        byte_level(framed=False), _of("LlamaConfig", rope_parameters=_LLAMA3_ROPE, **_IDS, **_HEADS), "lasttoken"
    ),
    "longformer": Family(
        byte_level(framed=True),
        _of(
            "LongformerConfig",
            attention_window=[16, 16],
            max_position_embeddings=130,
            type_vocab_size=1,
            sep_token_id=2,
            **_IDS,
            **SHAPE,
        ),
    ),
    "luke": Family(
        byte_level(framed=True),
        _of(
            "LukeConfig",
            entity_vocab_size=20,
            entity_emb_size=16,
            max_position_embeddings=130,
            type_vocab_size=1,
            **_IDS,
            **SHAPE,
        ),
    ),
    "megatron_bert": Family(word_piece(), _of("MegatronBertConfig", **_BERT)),
    "ministral": Family(
        byte_level(framed=False),
        _of("MinistralConfig", sliding_window=12, **_ALTERNATING, **_IDS, **_HEADS),
        "lasttoken",
    ),
    "mobilebert": Family(
        word_piece(),
        _of(
            "MobileBertConfig",
            embedding_size=16,
            intra_bottleneck_size=16,
            num_feedforward_networks=2,
            **_BERT,
        ),
    ),
    "modernbert_causal_free": Family(
        byte_level(framed=True),
        _of(
            "ModernBertConfig",
            global_attn_every_n_layers=1,
            cls_token_id=0,
            sep_token_id=2,
            max_position_embeddings=256,
            **_IDS,
            **SHAPE,
        ),
        "mean",
    ),
    "modernbert_decoder": Family(
        byte_level(framed=False),
        _of(
            "ModernBertDecoderConfig",
            global_attn_every_n_layers=2,
            local_attention=16,
            cls_token_id=0,
            sep_token_id=2,
            max_position_embeddings=256,
            **_IDS,
            **SHAPE,
        ),
        "lasttoken",
    ),
    "mt5": Family(unigram(None), _of("MT5Config", feed_forward_proj="gated-gelu", **_T5)),
    "nystromformer": Family(
        unigram("<s>"),
        _of("NystromformerConfig", num_landmarks=64, segment_means_seq_len=64, **_BERT | {"pad_token_id": 1}),
    ),
    "olmo2": Family(byte_level(framed=False), _of("Olmo2Config", **_IDS, **_DECODER), "lasttoken"),
    "opt": Family(
        byte_level(framed=True),
        _of(
            "OPTConfig",
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=64,
            word_embed_proj_dim=WIDTH,
            max_position_embeddings=128,
            init_std=0.2,
            **_IDS,
        ),
        "lasttoken",
    ),
    "phi3": Family(
        byte_level(framed=False),
        _of("Phi3Config", original_max_position_embeddings=256, **_IDS, **_DECODER),
        "lasttoken",
    ),
    "qwen2_yarn": Family(
        byte_level(framed=False), _of("Qwen2Config", rope_parameters=_YARN, **_IDS, **_HEADS), "lasttoken"
    ),
    "qwen2_moe": Family(
        byte_level(framed=False),
        _of(
            "Qwen2MoeConfig",
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            **_IDS,
            **_DECODER,
        ),
        "lasttoken",
    ),
    "qwen3_moe": Family(
        byte_level(framed=False),
        _of("Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, **_IDS, **_HEADS),
        "lasttoken",
    ),
    "qwen3_128": Family(  # of the only width of heads that transformers reads in GGUF
        qwen,
        _of("Qwen3Config", **_IDS, **_DECODER | {"head_dim": 128, "max_position_embeddings": MAX_LENGTH}),
        "lasttoken",
    ),
    "qwen3_5": Family(
        byte_level(framed=False),
        _of(
            "Qwen3_5TextConfig",
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            **_IDS,
            **_HEADS,
        ),
        "lasttoken",
    ),
    "rembert": Family(
        unigram("<s>"), _of("RemBertConfig", input_embedding_size=16, output_embedding_size=16, **_BERT | _IDS)
    ),
    "roberta_prelayernorm": Family(
        byte_level(framed=True),
        _of("RobertaPreLayerNormConfig", max_position_embeddings=130, type_vocab_size=1, **_IDS, **SHAPE),
    ),
    "roc_bert": Family(word_piece(), _of("RoCBertConfig", enable_pronunciation=False, enable_shape=False, **_BERT)),
    "roformer": Family(word_piece(), _of("RoFormerConfig", **_BERT)),
    "smollm3": Family(byte_level(framed=False), _of("SmolLM3Config", **_IDS, **_DECODER), "lasttoken"),
    "squeezebert": Family(word_piece(), _of("SqueezeBertConfig", embedding_size=WIDTH, **_BERT)),
    "stablelm": Family(byte_level(framed=False), _of("StableLmConfig", **_IDS, **_DECODER), "lasttoken"),
    "t5_relu": Family(unigram(None), _of("T5Config", feed_forward_proj="relu", **_T5)),
    "umt5": Family(unigram(None), _of("UMT5Config", feed_forward_proj="gated-gelu", **_T5)),
    "xlm_roberta_xl": Family(
        unigram("<s>"), _of("XLMRobertaXLConfig", max_position_embeddings=130, type_vocab_size=1, **_IDS, **SHAPE)
    ),
    "xlnet": Family(
        unigram("<s>"),
        _of("XLNetConfig", d_model=WIDTH, n_layer=2, n_head=4, d_inner=64, initializer_range=0.2, **_IDS),
    ),
    "xmod": Family(
        unigram("<s>"),
        _of(
            "XmodConfig",
            languages=["en_XX", "de_DE"],
            default_language="en_XX",
            max_position_embeddings=130,
            type_vocab_size=1,
            **_IDS,
            **SHAPE,
        ),
    ),
}


def family_of(name: str) -> Family:
    """An architecture by its name; with `_wide` behind it each head has 16 columns, as few as the C library norms."""
    plain = name.removesuffix("_wide")
    family = FAMILIES.get(plain) or FURTHER[plain]
    return family if plain == name else replace(family, config=partial(_wide, family))


def _wide(family: Family, vocabulary: int) -> transformers.PreTrainedConfig:
    config = family.config(vocabulary)
    config.head_dim = 16
    return config
