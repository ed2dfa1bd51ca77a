"""A model on a device: tokenizer, queue, padding-free forward, pooling and heads."""
