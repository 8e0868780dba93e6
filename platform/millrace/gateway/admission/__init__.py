"""Admission control: rate limits, budgets, idempotency keys, and rejections."""
