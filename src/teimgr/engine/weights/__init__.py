"""Weights on their way into a model: adapters, GGUF, ONNX and files of a model's own, copies on the host."""
