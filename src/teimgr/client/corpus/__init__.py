"""Embedding of whole files: Parquet, JSON lines, CSV, text or Arrow in; Parquet, Arrow or NumPy out.

`job.embed_file` streams in constant memory and resumes after any interruption, a kill included.
"""

from teimgr.client.corpus.job import EmbeddedFile, Progress, embed_file

__all__ = ["EmbeddedFile", "Progress", "embed_file"]
