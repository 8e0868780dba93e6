"""Batches and their files: list, progress, errors by line, upload, cancellation and download."""
