"""gRPC on the instance port: `tei.v1`, health and reflection over the same dispatcher as HTTP and links.

HTTP/2 is grpclib's, on the loop that serves HTTP there. It is imported after the fork only, which keeps the fork server
small; grpcio, which starts threads of its own, is not loaded in workers.
"""
