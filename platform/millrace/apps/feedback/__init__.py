"""Feedback that callers submit on their requests. See docs/batches.md."""
