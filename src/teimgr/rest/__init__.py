"""What clients talk to: REST over FastAPI, the gRPC multiplexer."""
