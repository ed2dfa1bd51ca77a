"""Weights to load into a model: adapters, GGUF, ONNX, models' own formats, copies on the host."""
