"""The gRPC multiplexer process (port 9001): calls to workers, streams, health, reflection."""
