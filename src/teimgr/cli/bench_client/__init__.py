"""`bench-client`: load on one instance through the multiplexer, with the flags and result keys of tei-manager's."""

import os

# Silences gRPC core's log of a failed connection, which the command reports itself.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from teimgr.cli.bench_client.command import main

__all__ = ["main"]
