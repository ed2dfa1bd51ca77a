"""NomicBERT variants that transformers lacks: with experts, biases, or plain feed-forward layers."""
