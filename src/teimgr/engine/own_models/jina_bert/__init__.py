"""JinaBERT v2: BERT with ALiBi in the place of positions, and gated feed-forward layers."""
