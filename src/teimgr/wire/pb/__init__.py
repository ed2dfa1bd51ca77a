"""Protobuf messages, generated from `proto/` by `dev.py proto`."""
