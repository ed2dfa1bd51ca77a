"""gRPC semantics shared by the mux port and the instance port, without a transport: methods, streams, services."""
