"""`bench-client`: load on one instance through the multiplexer, with the flags and result keys of tei-manager's."""

import os

# What gRPC's core would print about a failed connection is said again, in one line, by the command itself.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from teimgr.bench_client.command import main

__all__ = ["main"]
