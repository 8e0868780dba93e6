"""Attention and other kernels, each with a reference in plain PyTorch. Imports no other package of the project."""
