"""Speculative decoding: drafts of the next tokens, which the model verifies in one step. Does not import torch."""
