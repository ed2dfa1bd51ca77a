"""HTTP/2 in clear text and over TLS: connections, streams, and HTTP requests on them.

The `h2` library parses and writes frames. gRPC on an instance's port (`worker/grpc_port/`) uses the same connections.
"""
