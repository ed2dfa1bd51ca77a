"""What processes and clients exchange: frames, protobuf, Arrow, errors; gRPC, routing to workers, quotas. No torch."""
