"""JinaBERT v2: BERT with ALiBi in place of positions, and gated feed-forward layers."""
