"""The overview of a tenant: spend, cache, tokens, latency, errors and keys."""
