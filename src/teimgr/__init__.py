"""teimgr: one daemon for a fleet of embedding models."""

__version__ = "0.1.0"
