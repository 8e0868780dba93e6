"""What callers report of their requests: whether the answer was of use. See docs/batches.md."""
