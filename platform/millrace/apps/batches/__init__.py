"""Batches: files of requests that run in the background with the lowest priority. See docs/reference/batches.md."""
