"""Texts to token ids: prompts, templates, truncation, the tokenizers library, and WordPiece in C."""
