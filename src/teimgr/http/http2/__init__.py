"""HTTP/2 in clear text and over TLS: connections, streams, and HTTP requests on them.

gRPC on the mux port and on the ports of instances uses the same connections (`wire/grpc_core/rpc.py`).
"""
