"""What is made of hidden states: one file per kind of head.

    pooling, dense     one vector per text
    projections        the Dense, LayerNorm and Normalize modules behind a pooling or every token
    splade             a weight per vocabulary entry, from a masked-LM head
    tokens             the hidden states themselves
    multi_vector       late interaction: a projected vector per kept token
    m3                 BGE-M3's sparse weights and token vectors, beside its dense vector
    library            the head of a transformers model, run by itself on hidden states; three of those below use it
    classification     labels and cross-encoders
    causal             rerankers that are language models: the logits of two tokens

A head knows neither jobs nor requests. Normalising, cutting and activations that a request decides on are the
finisher's (`dense.finish`, `classification.activate`).
"""

from teimgr.engine.heads.base import Head, Rows

__all__ = ["Head", "Rows"]
