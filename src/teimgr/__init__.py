"""teimgr: one daemon for a fleet of embedding and reranking models."""

__version__ = "0.1.0"
