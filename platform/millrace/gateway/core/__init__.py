"""Errors, ids, tracing, and request and response types. Imports nothing else of the gateway."""
