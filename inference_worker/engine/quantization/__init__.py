"""Quantized weights: the formats of checkpoints, and quantization when a model is loaded."""
