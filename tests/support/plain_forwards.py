"""Forwards of models whose repositories carry code of their own, written as plainly as possible: one text, float32, no
padding, weights by their names in the hub's files. What the product serves is compared with these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Weights = dict[str, Tensor]


def frequencies(base: float, size: int) -> Tensor:
    return base ** -(torch.arange(0, size, 2).float() / size)


def rotated(x: Tensor, inverse: Tensor) -> Tensor:
    """Heads [heads, T, d] turned by their positions."""
    angles = torch.arange(x.shape[1]).float()[:, None] * inverse[None]
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """Heads [heads, T, d] → [T, heads · d]."""
    weights = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]) + bias).softmax(-1)
    return (weights @ v).transpose(0, 1).flatten(1)


def split(x: Tensor, heads: int) -> Tensor:
    return x.view(len(x), heads, -1).transpose(0, 1)


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return functional.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def normed(w: Weights, name: str, x: Tensor, eps: float = 1e-12) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)


def _packed_attention(w: Weights, name: str, x: Tensor, heads: int, inverse: Tensor) -> Tensor:
    q, k, v = (split(part, heads) for part in linear(w, name, x).chunk(3, dim=-1))
    return attended(rotated(q, inverse), rotated(k, inverse), v)


def nomic(w: Weights, c: dict[str, Any], ids: Tensor) -> Tensor:
    """NomicBERT as its own code computes it, hidden states [T, width]: dynamic NTK past the trained length; gated or
    plain layers, and experts of which each token has the likeliest, weighed by their probabilities among all.
    """
    size = c["n_embd"] // c["n_head"]
    base, factor, trained = float(c["rotary_emb_base"]), c.get("rotary_scaling_factor"), c["max_trained_positions"]
    if factor and len(ids) > trained:
        base *= (factor * len(ids) / trained - (factor - 1)) ** (size / (size - 2))
    inverse, eps = frequencies(base, size), c["layer_norm_epsilon"]
    x = w["embeddings.word_embeddings.weight"][ids]
    if c["type_vocab_size"]:
        x = x + w["embeddings.token_type_embeddings.weight"][0]
    x = normed(w, "emb_ln", x, eps)
    for i in range(c["n_layer"]):
        own = f"encoder.layers.{i}"
        mixed = _packed_attention(w, f"{own}.attn.Wqkv", x, c["n_head"], inverse)
        x = normed(w, f"{own}.norm1", x + linear(w, f"{own}.attn.out_proj", mixed), eps)
        x = normed(w, f"{own}.norm2", x + _nomic_mlp(w, c, f"{own}.mlp", x), eps)
    return x


def _nomic_mlp(w: Weights, c: dict[str, Any], own: str, x: Tensor) -> Tensor:
    if f"{own}.fc11.weight" in w:
        return linear(w, f"{own}.fc2", linear(w, f"{own}.fc11", x) * functional.silu(linear(w, f"{own}.fc12", x)))
    if f"{own}.fc1.weight" in w:
        return linear(w, f"{own}.fc2", functional.gelu(linear(w, f"{own}.fc1", x)))
    shares = linear(w, f"{own}.router.layer", x).softmax(-1)
    w1, w2 = (w[f"{own}.experts.mlp.{name}"].unflatten(0, (c["num_experts"], -1)) for name in ("w1", "w2"))
    rows = []
    for token, own_shares in zip(x, shares, strict=True):
        best = own_shares.topk(c["moe_top_k"]).indices
        rows.append(sum(own_shares[e] * (functional.gelu(w1[e] @ token) @ w2[e]) for e in best.tolist()))
    return torch.stack(rows) + w[f"{own}.experts.bias"]


def new_impl(w: Weights, c: dict[str, Any], ids: Tensor) -> Tensor:
    """Alibaba's new-impl, hidden states [T, width]: `ntk` scales base and frequencies at every length."""
    size = c["hidden_size"] // c["num_attention_heads"]
    factor = (c.get("rope_scaling") or {}).get("factor", 1.0)
    inverse = frequencies(c["rope_theta"] * factor, size) / factor ** (2 / size)
    x = w["embeddings.word_embeddings.weight"][ids]
    if c["type_vocab_size"]:
        x = x + w["embeddings.token_type_embeddings.weight"][0]
    x = normed(w, "embeddings.LayerNorm", x)
    for i in range(c["num_hidden_layers"]):
        own = f"encoder.layer.{i}"
        mixed = _packed_attention(w, f"{own}.attention.qkv_proj", x, c["num_attention_heads"], inverse)
        x = normed(w, f"{own}.attn_ln", x + linear(w, f"{own}.attention.o_proj", mixed))
        up, gate = linear(w, f"{own}.mlp.up_gate_proj", x).chunk(2, dim=-1)
        x = normed(w, f"{own}.mlp_ln", x + linear(w, f"{own}.mlp.down_proj", functional.gelu(gate) * up))
    return x


def new_splade(w: Weights, c: dict[str, Any], ids: Tensor) -> Tensor:
    """The entries [vocabulary] of SPLADE on new-impl with its masked-LM head, by `log1p_relu`."""
    x = normed(w, "lm_head.norm", functional.gelu(linear(w, "lm_head.dense", new_impl(w, c, ids))))
    return torch.log1p(torch.log1p(linear(w, "lm_head.decoder", x).relu())).amax(0)


def jina_xlm_roberta(w: Weights, c: dict[str, Any], ids: Tensor) -> Tensor:
    """Jina's flash implementation of XLM-RoBERTa, hidden states [T, width]; names without `roberta.`."""
    heads, eps = c["num_attention_heads"], c["layer_norm_eps"]
    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.token_type_embeddings.weight"][0]
    inverse = frequencies(c.get("rotary_emb_base", 10000.0), c["hidden_size"] // heads)
    if c["position_embedding_type"] == "absolute":
        x = x + w["embeddings.position_embeddings.weight"][c["pad_token_id"] + 1 :][: len(ids)]
        inverse = torch.zeros_like(inverse)  # turns nothing
    x = normed(w, "emb_ln", x, eps)
    for own in (f"encoder.layers.{i}" for i in range(c["num_hidden_layers"])):
        mixed = _packed_attention(w, f"{own}.mixer.Wqkv", x, heads, inverse)
        x = normed(w, f"{own}.norm1", x + linear(w, f"{own}.mixer.out_proj", mixed), eps)
        inner = functional.gelu(linear(w, f"{own}.mlp.fc1", x))
        x = normed(w, f"{own}.norm2", x + linear(w, f"{own}.mlp.fc2", inner), eps)
    return x


def alibi(heads: int, length: int) -> Tensor:
    """Biases [heads, T, T] of JinaBERT: −slope · |i − j|."""

    def slopes(count: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(count) - 3)))
        return [start * start**i for i in range(count)]

    closest = 2 ** math.floor(math.log2(heads))
    own = torch.tensor(slopes(closest) + slopes(2 * closest)[::2][: heads - closest])
    place = torch.arange(length).float()
    return -own[:, None, None] * (place[None] - place[:, None]).abs()


def jina_bert(w: Weights, c: dict[str, Any], ids: Tensor, types: Tensor | None = None) -> Tensor:
    """JinaBERT v2, hidden states [T, width], names without `bert.`; with `layer_norm_1` its variant for code."""
    heads = c["num_attention_heads"]
    bias, gate = alibi(heads, len(ids)), getattr(functional, c["feed_forward_type"].replace("glu", "lu"))
    types = torch.zeros_like(ids) if types is None else types
    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.token_type_embeddings.weight"][types]
    x = normed(w, "embeddings.LayerNorm", x)
    for own in (f"encoder.layer.{i}" for i in range(c["num_hidden_layers"])):
        q, k, v = (linear(w, f"{own}.attention.self.{name}", x) for name in ("query", "key", "value"))
        is_code = f"{own}.layer_norm_1.weight" in w
        if is_code:
            q, k = (
                normed(w, f"{own}.attention.self.layer_norm_q", q),
                normed(w, f"{own}.attention.self.layer_norm_k", k),
            )
        mixed = attended(split(q, heads), split(k, heads), split(v, heads), bias)
        mixed = normed(w, f"{own}.attention.output.LayerNorm", linear(w, f"{own}.attention.output.dense", mixed) + x)
        if not is_code:
            gated, plain = linear(w, f"{own}.mlp.gated_layers", mixed).chunk(2, dim=-1)
            x = normed(w, f"{own}.mlp.layernorm", linear(w, f"{own}.mlp.wo", gate(gated) * plain) + mixed)
            continue
        x = normed(w, f"{own}.layer_norm_1", x + mixed)
        plain, gated = linear(w, f"{own}.mlp.up_gated_layer", x).chunk(2, dim=-1)
        x = normed(w, f"{own}.layer_norm_2", x + linear(w, f"{own}.mlp.down_layer", plain * gate(gated)))
    return x


def roberta_score(w: Weights, hidden: Tensor) -> Tensor:
    """The head of RoBERTa for sequences, on the first token: dense, tanh, out_proj."""
    return linear(w, "classifier.out_proj", linear(w, "classifier.dense", hidden[0]).tanh())


def classified(w: Weights, hidden: Tensor) -> Tensor:
    """The logits of BERT's head, [labels]: a dense layer and tanh on the first token, and the classifier."""
    return linear(w, "classifier", linear(w, "pooler.dense", hidden[0]).tanh())


def causal(w: Weights, c: dict[str, Any], ids: Tensor, *, both_ways: bool) -> Tensor:
    """Qwen2, Qwen3, Llama or Mistral, hidden states [T, width]; `both_ways`: every token sees all others."""
    heads, groups = c["num_attention_heads"], c["num_attention_heads"] // c["num_key_value_heads"]
    size = c.get("head_dim") or c["hidden_size"] // heads
    inverse = frequencies((c.get("rope_parameters") or c)["rope_theta"], size)
    bias = 0.0 if both_ways else torch.full((len(ids), len(ids)), -torch.inf).triu(1)

    def scaled(name: str, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], c["rms_norm_eps"])

    def projected(name: str, count: int, norm: str) -> Tensor:
        found = split(linear(w, f"{own}.self_attn.{name}", inner), count)
        return scaled(f"{own}.self_attn.{norm}", found) if f"{own}.self_attn.{norm}.weight" in w else found

    x = w["embed_tokens.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        own = f"layers.{i}"
        inner = scaled(f"{own}.input_layernorm", x)
        q = rotated(projected("q_proj", heads, "q_norm"), inverse)
        k = rotated(projected("k_proj", heads // groups, "k_norm"), inverse).repeat_interleave(groups, dim=0)
        v = projected("v_proj", heads // groups, "none").repeat_interleave(groups, dim=0)
        x = x + linear(w, f"{own}.self_attn.o_proj", attended(q, k, v, bias))
        inner = scaled(f"{own}.post_attention_layernorm", x)
        gate = functional.silu(linear(w, f"{own}.mlp.gate_proj", inner))
        x = x + linear(w, f"{own}.mlp.down_proj", gate * linear(w, f"{own}.mlp.up_proj", inner))
    return scaled("norm", x)


def lfm2(w: Weights, c: dict[str, Any], ids: Tensor) -> Tensor:
    """LFM2 whose tokens see all others, hidden states [T, width]: attention without a mask, centred convolutions."""
    heads, groups = c["num_attention_heads"], c["num_attention_heads"] // c["num_key_value_heads"]
    size = c["hidden_size"] // heads
    inverse = frequencies((c.get("rope_parameters") or c)["rope_theta"], size)

    def scaled(name: str, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], c["norm_eps"])

    x = w["embed_tokens.weight"][ids]
    for i, kind in enumerate(c["layer_types"]):
        own = f"layers.{i}"
        inner = scaled(f"{own}.operator_norm", x)
        if kind == "conv":
            gate, out, mixed = linear(w, f"{own}.conv.in_proj", inner).chunk(3, dim=-1)
            kernel = w[f"{own}.conv.conv.weight"][:, 0]  # [width, 3]
            padded = functional.pad(gate * mixed, (0, 0, 1, 1))
            mixed = sum(padded[j : j + len(x)] * kernel[:, j] for j in range(3))
            x = x + linear(w, f"{own}.conv.out_proj", out * mixed)
        else:
            q, k, v = (linear(w, f"{own}.self_attn.{name}_proj", inner) for name in "qkv")
            q = rotated(scaled(f"{own}.self_attn.q_layernorm", split(q, heads)), inverse)
            k = rotated(scaled(f"{own}.self_attn.k_layernorm", split(k, heads // groups)), inverse)
            k, v = (part.repeat_interleave(groups, dim=0) for part in (k, split(v, heads // groups)))
            x = x + linear(w, f"{own}.self_attn.out_proj", attended(q, k, v))
        inner = scaled(f"{own}.ffn_norm", x)
        gated = functional.silu(linear(w, f"{own}.feed_forward.w1", inner)) * linear(w, f"{own}.feed_forward.w3", inner)
        x = x + linear(w, f"{own}.feed_forward.w2", gated)
    return scaled("embedding_norm", x)


POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda hidden: hidden.mean(0),
    "cls": lambda hidden: hidden[0],
    "lasttoken": lambda hidden: hidden[-1],
}
