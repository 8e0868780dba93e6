"""Authentication: finds the snapshot of the request's API key, and ends its requests when the key is revoked."""
