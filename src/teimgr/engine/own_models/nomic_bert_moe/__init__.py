"""NomicBERT as transformers does not have it: with experts, biases, or plain feed-forward layers."""
