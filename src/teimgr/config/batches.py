"""`[batches]`: limits of the files and batches that `/v1/files` and `/v1/batches` keep."""

from __future__ import annotations

from dataclasses import dataclass

from teimgr.spec import U32, key


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """Sizes are MiB or KiB as the names state. They are in the folder `batches` beside the state file."""

    enabled: bool = key(True, "serve /v1/files and /v1/batches")
    max_file_mb: int = key(200, "largest uploaded file, MiB", low=1, high=U32)
    max_key_mb: int = key(4096, "files of one API key, the results of its batches included, MiB", low=1, high=U32)
    max_total_mb: int = key(16384, "files of all keys, MiB", low=1, high=U32)
    max_files: int = key(1000, "files of one API key", low=1, high=100_000)
    max_batches: int = key(100, "unfinished batches of one API key", low=1, high=10_000)
    max_lines: int = key(50_000, "requests of one batch", low=1, high=1_000_000)
    max_line_kb: int = key(
        2048, "largest line of an input file, KiB; at most inference_max_body_mb counts", low=1, high=16384
    )
    concurrency: int = key(64, "requests of all batches in the workers at a time", low=1, high=1024)
    retention_days: int = key(
        30, "ended batches, and files that name no expires_after, are deleted after so long", low=1, high=3650
    )
