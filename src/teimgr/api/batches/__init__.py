"""OpenAI's files and batches: requests from a file, worked off in the bulk lane, and their results as files."""

from teimgr.api.batches.service import Batches

__all__ = ["Batches"]
