"""Attention backends and their registry."""
