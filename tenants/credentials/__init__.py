"""Upstream credentials: their encryption at rest, and their delivery to workers."""
