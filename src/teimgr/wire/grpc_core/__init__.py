"""gRPC semantics shared by the mux port and the instance port: methods, streams, services."""
