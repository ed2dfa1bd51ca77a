"""The configuration of JinaBERT v2."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig


@strict
class JinaBertConfig(PreTrainedConfig):
    """`qk_norm` selects the variant of jina-embeddings-v2-base-code, `jina-bert-v2-qk-post-norm`, which normalises
    queries, keys, and both sums of a layer. `feed_forward_type` is geglu or reglu.
    """

    model_type = "jina_bert"

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    position_embedding_type: str = "alibi"
    feed_forward_type: str = "geglu"
    qk_norm: bool = False
