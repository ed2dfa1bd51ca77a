"""The worker process: one model, its engine, and the protocols over which calls arrive.

Path of a call (`calls`): `link_server`, `grpc_port` or `http_port` → `methods` and `arrow_calls`, or `dialects` by
`http_inference` → `dispatcher` → engine, and back. `process` starts and ends the process.
"""
