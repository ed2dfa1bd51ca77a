"""NomicBERT of nomic-embed-text-v2-moe: rotary positions, biases, and experts in every second layer.

It computes the same as the code of `nomic-ai/nomic-bert-2048`; attributes have the names of the weights in the files.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from teimgr.engine.own_models.nomic_bert_moe.configuration_nomic_bert_moe import NomicBertMoeConfig

Rotation = tuple[Tensor, Tensor]


class _Rotary(nn.Module):
    """cos and sin of positions, [rows, T, d]. `engine.rotary` has the module for the rope type "dynamic"."""

    def __init__(self, config: NomicBertMoeConfig) -> None:
        super().__init__()
        self.config = config
        self.rope_type = _rope(config)["rope_type"]

    def forward(self, x: Tensor, position_ids: Tensor) -> Rotation:
        size = self.config.hidden_size // self.config.num_attention_heads
        exponents = torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size
        inverse = 1.0 / _rope(self.config)["rope_theta"] ** exponents
        angles = position_ids[..., None].to(torch.float32) * inverse
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _rope(config: NomicBertMoeConfig) -> dict[str, Any]:
    return config.rope_parameters or {"rope_type": "default", "rope_theta": 10000.0}


def _turned(x: Tensor, rotation: Rotation) -> Tensor:
    """Heads [texts, heads, T, d], turned by their positions."""
    cos, sin = (part.unsqueeze(1) for part in rotation)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class _Embeddings(nn.Module):
    def __init__(self, config: NomicBertMoeConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        types = config.type_vocab_size
        self.token_type_embeddings = nn.Embedding(types, config.hidden_size) if types else None

    def forward(self, ids: Tensor, types: Tensor | None) -> Tensor:
        rows: Tensor = self.word_embeddings(ids)
        if self.token_type_embeddings is None:
            return rows
        return rows + self.token_type_embeddings(torch.zeros_like(ids) if types is None else types)


class _Attention(nn.Module):
    def __init__(self, config: NomicBertMoeConfig) -> None:
        super().__init__()
        self.config = config
        self.is_causal = False
        width = config.hidden_size
        self.Wqkv = nn.Linear(width, 3 * width, bias=config.qkv_proj_bias)
        self.out_proj = nn.Linear(width, width, bias=config.qkv_proj_bias)

    def forward(self, x: Tensor, mask: Tensor | None, rotation: Rotation, **options: Any) -> Tensor:
        shape = (*x.shape[:-1], self.config.num_attention_heads, -1)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.Wqkv(x).chunk(3, dim=-1))
        query, key = _turned(query, rotation), _turned(key, rotation)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, sdpa_attention_forward)
        mixed, _ = attend(self, query, key, value, mask, **options)
        return self.out_proj(mixed.flatten(2))


class _GatedMLP(nn.Module):
    def __init__(self, config: NomicBertMoeConfig) -> None:
        super().__init__()
        self.fc11 = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_fc1_bias)
        self.fc12 = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_fc1_bias)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_fc2_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc11(x) * functional.silu(self.fc12(x)))


class _PlainMLP(nn.Module):
    def __init__(self, config: NomicBertMoeConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_fc1_bias)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_fc2_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(functional.gelu(self.fc1(x)))


class _Router(nn.Module):
    def __init__(self, config: NomicBertMoeConfig) -> None:
        super().__init__()
        self.layer = nn.Linear(config.hidden_size, config.num_experts, bias=False)


class _ExpertWeights(nn.Module):
    """`w1` and `w2`, [experts · inner, width], expert after expert."""

    def __init__(self, config: NomicBertMoeConfig) -> None:
        super().__init__()
        shape = (config.num_experts * config.intermediate_size, config.hidden_size)
        self.w1, self.w2 = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))


class _Experts(nn.Module):
    """The experts, with one common bias that is added once."""

    def __init__(self, config: NomicBertMoeConfig) -> None:
        super().__init__()
        self.mlp = _ExpertWeights(config)
        self.bias = nn.Parameter(torch.empty(config.hidden_size))


class _ExpertsMLP(nn.Module):
    """Σ over the most probable experts: probability · GELU(x · w1ᵀ) · w2, with probabilities among all experts."""

    def __init__(self, config: NomicBertMoeConfig) -> None:
        super().__init__()
        self.count, self.most = config.num_experts, config.moe_top_k
        self.router = _Router(config)
        self.experts = _Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        shares, chosen = self.router.layer(rows).float().softmax(-1).topk(self.most, dim=-1)
        result = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        expand, reduce = (
            weights.unflatten(0, (self.count, -1)) for weights in (self.experts.mlp.w1, self.experts.mlp.w2)
        )
        for expert in range(self.count):
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            if len(tokens):
                inner = functional.gelu(functional.linear(rows[tokens], expand[expert]))
                result.index_add_(0, tokens, (inner @ reduce[expert]).float() * shares[tokens, places, None])
        return (result + self.experts.bias).to(x.dtype).view_as(x)


class _Layer(nn.Module):
    def __init__(self, config: NomicBertMoeConfig, index: int) -> None:
        super().__init__()
        self.attn = _Attention(config)
        self.mlp = _feed_forward(config, index)
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, mask: Tensor | None, rotation: Rotation, **options: Any) -> Tensor:
        x = self.norm1(x + self.attn(x, mask, rotation, **options))
        return self.norm2(x + self.mlp(x))


def _feed_forward(config: NomicBertMoeConfig, index: int) -> nn.Module:
    if config.num_experts and config.moe_every_n_layers and index % config.moe_every_n_layers == 1:
        return _ExpertsMLP(config)
    return _GatedMLP(config) if config.hidden_act == "silu" else _PlainMLP(config)


class _Encoder(nn.Module):
    def __init__(self, config: NomicBertMoeConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(config, index) for index in range(config.num_hidden_layers))


class NomicBertMoeModel(PreTrainedModel):
    """Hidden states."""

    config_class = NomicBertMoeConfig
    base_model_prefix = "bert"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: NomicBertMoeConfig) -> None:
        super().__init__(config)
        self.embeddings = _Embeddings(config)
        self.emb_ln = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.encoder = _Encoder(config)
        self.rotary_emb = _Rotary(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.word_embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        **options: Any,
    ) -> BaseModelOutput:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        hidden = self.emb_ln(self.embeddings(input_ids, token_type_ids))
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=hidden, attention_mask=attention_mask)
        rotation = self.rotary_emb(hidden, position_ids)
        for layer in self.encoder.layers:
            hidden = layer(hidden, mask, rotation, **options)
        return BaseModelOutput(last_hidden_state=hidden)
