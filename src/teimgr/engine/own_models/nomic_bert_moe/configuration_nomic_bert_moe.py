"""The configuration of NomicBERT with experts, with the library's names if it has them."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig


@strict
class NomicBertMoeConfig(PreTrainedConfig):
    """`hidden_act` silu means gated feed-forward layers, gelu plain ones. Layers i with i mod `moe_every_n_layers` = 1
    have `num_experts` experts instead, of which each token uses the `moe_top_k` most probable.
    """

    model_type = "nomic_bert_moe"

    vocab_size: int = 250048
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    max_position_embeddings: int = 2048
    type_vocab_size: int = 1
    layer_norm_eps: float = 1e-5
    pad_token_id: int | None = 1
    qkv_proj_bias: bool = True
    mlp_fc1_bias: bool = True
    mlp_fc2_bias: bool = True
    num_experts: int = 0
    moe_top_k: int = 2
    moe_every_n_layers: int = 0
    rope_parameters: dict[str, Any] | None = None
