"""The models that a tenant can request."""
