"""Feedback that callers submit on their requests. See docs/reference/batches.md."""
