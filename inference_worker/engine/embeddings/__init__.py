"""The engine of embedding models."""
