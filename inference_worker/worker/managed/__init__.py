"""Managed engines: servers that a worker starts and supervises."""
