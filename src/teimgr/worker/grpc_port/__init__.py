"""gRPC on the instance port: `tei.v1` over the same dispatcher as everything else.

The HTTP/2 half is grpclib's, on the loop that serves HTTP there. It is imported after the fork only: the nursery stays
small, and grpcio, which brings threads of its own, stays out of workers.
"""
