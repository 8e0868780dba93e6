"""Sampling: logits processors, token choice and log-probabilities."""
