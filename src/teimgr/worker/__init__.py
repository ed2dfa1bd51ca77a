"""The worker process: one model, its engine, and the protocols over which calls arrive.

The path of a call: `link_server`, `grpc_port` or `http_port` → `methods` (gRPC and Arrow) or `dialects` (HTTP) →
`dispatcher`, with `limits` → the engine, and back. `process` is the life of the process.
"""
