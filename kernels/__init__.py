"""Kernels, each with its plain PyTorch reference. Knows nothing of what stands above it."""
