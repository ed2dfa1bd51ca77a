"""JinaBERT v2 of jina-embeddings-v2-* and jina-reranker-v1-*: BERT with ALiBi and gated feed-forward layers.

It computes the same as the code of `jinaai/jina-bert-implementation`, or with `qk_norm` as that of
`jinaai/jina-bert-v2-qk-post-norm`. Attributes have the names of the weights in the files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutputWithPooling, SequenceClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from teimgr.engine.attention import alibi_slopes, biased_attention
from teimgr.engine.own_models.jina_bert.configuration_jina_bert import JinaBertConfig

_LIBRARY = ("sdpa", "eager")
_GATES: dict[str, Callable[[Tensor], Tensor]] = {"geglu": functional.gelu, "reglu": functional.relu}


class _Embeddings(nn.Module):
    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, ids: Tensor, types: Tensor | None) -> Tensor:
        types = torch.zeros_like(ids) if types is None else types
        return self.LayerNorm(self.word_embeddings(ids) + self.token_type_embeddings(types))


class _SelfAttention(nn.Module):
    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__()
        self.config = config
        self.is_causal = False
        width = config.hidden_size
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        if config.qk_norm:
            self.layer_norm_q = nn.LayerNorm(width, eps=config.layer_norm_eps)
            self.layer_norm_k = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, seen: Tensor | None, **options: Any) -> Tensor:
        """[texts, T, width] → the same; `seen` is boolean [texts, 1, 1, T], keys; None: all are."""
        config = self.config
        query, key = self.query(x), self.key(x)
        if config.qk_norm:
            query, key = self.layer_norm_q(query), self.layer_norm_k(key)
        shape = (*x.shape[:-1], config.num_attention_heads, -1)
        query, key, value = (rows.view(shape).transpose(1, 2) for rows in (query, key, self.value(x)))
        slopes = alibi_slopes(config.num_attention_heads, x.device)
        if config._attn_implementation in _LIBRARY:
            return biased_attention(query, key, value, slopes, seen=seen).transpose(1, 2).flatten(2)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, sdpa_attention_forward)
        mixed, _ = attend(self, query, key, value, seen, alibi_slopes=slopes, **options)
        return mixed.flatten(2)


class _SelfOutput(nn.Module):
    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, mixed: Tensor, x: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(mixed) + x)


class _Attention(nn.Module):
    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__()
        self.self = _SelfAttention(config)
        self.output = _SelfOutput(config)

    def forward(self, x: Tensor, seen: Tensor | None, **options: Any) -> Tensor:
        return self.output(self.self(x, seen, **options), x)


class _GatedMLP(nn.Module):
    """The first half of the columns is gated; includes residual and norm."""

    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__()
        self.gate = _GATES[config.feed_forward_type]
        self.gated_layers = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.wo = nn.Linear(config.intermediate_size, config.hidden_size)
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        gated, plain = self.gated_layers(x).chunk(2, dim=-1)
        return self.layernorm(self.wo(self.gate(gated) * plain) + x)


class _PostNormMLP(nn.Module):
    """The second half of the columns is gated; the layer adds residual and norm."""

    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__()
        self.gate = _GATES[config.feed_forward_type]
        self.up_gated_layer = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_layer = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        plain, gated = self.up_gated_layer(x).chunk(2, dim=-1)
        return self.down_layer(plain * self.gate(gated))


class _Layer(nn.Module):
    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__()
        self.qk_norm = config.qk_norm
        self.attention = _Attention(config)
        self.mlp = _PostNormMLP(config) if config.qk_norm else _GatedMLP(config)
        if config.qk_norm:
            self.layer_norm_1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
            self.layer_norm_2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, seen: Tensor | None, **options: Any) -> Tensor:
        mixed = self.attention(x, seen, **options)
        if not self.qk_norm:
            return self.mlp(mixed)
        x = self.layer_norm_1(x + mixed)
        return self.layer_norm_2(x + self.mlp(x))


class _Encoder(nn.Module):
    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))


class _Pooler(nn.Module):
    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dense(hidden[:, 0]).tanh()


class _PreTrainedModel(PreTrainedModel):
    config_class = JinaBertConfig
    base_model_prefix = "bert"
    _supports_sdpa = True
    _supports_attention_backend = True


class JinaBertModel(_PreTrainedModel):
    """Hidden states; with `add_pooling_layer` also the first token's after a dense layer with tanh."""

    def __init__(self, config: JinaBertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = _Embeddings(config)
        self.encoder = _Encoder(config)
        self.pooler = _Pooler(config) if add_pooling_layer else None
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
    ) -> BaseModelOutputWithPooling:
        """`position_ids` have no effect: distances within a text are counted from its first token."""
        seen = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        hidden = self.embeddings(input_ids, token_type_ids)
        for layer in self.encoder.layer:
            hidden = layer(hidden, seen, **options)
        pooled = None if self.pooler is None else self.pooler(hidden)
        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=pooled)


class JinaBertForSequenceClassification(_PreTrainedModel):
    """Logits from the pooled first token."""

    def __init__(self, config: JinaBertConfig) -> None:
        super().__init__(config)
        self.bert = JinaBertModel(config)
        self.classifier = nn.Linear(config.hidden_size, len(config.id2label or ()))
        self.post_init()

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor | None = None, **options: Any
    ) -> SequenceClassifierOutput:
        pooled = self.bert(input_ids, token_type_ids=token_type_ids, **options).pooler_output
        return SequenceClassifierOutput(logits=self.classifier(pooled))
