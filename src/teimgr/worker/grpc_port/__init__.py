"""gRPC on the instance port: `tei.v1`, health and reflection over the same dispatcher as HTTP and links.

HTTP/2 is that of `http2/`, on the loop that serves HTTP/1.1 there. It is imported after the fork only, which keeps the
fork server small; grpcio, which starts threads of its own, is not loaded in workers.
"""
