"""Batches: files of requests that are answered in the background, at the lowest priority. See docs/batches.md."""
