"""OpenAI's files and batches: requests from a file, computed in the bulk lane, with results as files."""

from teimgr.api.batches.service import Batches

__all__ = ["Batches"]
