"""API-key cache, revocation, and the requests that are active for each key."""
