"""Metrics of the engine, its roofline, and the size of its KV cache."""
