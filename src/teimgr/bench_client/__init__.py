"""`bench-client`: load on one instance through the multiplexer, with the flags and result keys of tei-manager's."""

from teimgr.bench_client.command import main

__all__ = ["main"]
