"""Random and broken input against a real daemon: REST by its own document, protobuf and Arrow over gRPC."""
