"""Hugging Face directories and GGUF files: configurations, tokenizers, templates, conversion. Does not import torch."""
