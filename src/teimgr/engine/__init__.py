"""Tensors: tokenizer, queue, packed batches, models. Knows no protocol and no server."""
