"""Byte formats between processes and with clients: frames, protobuf scanning, Arrow, error bodies. No torch."""
