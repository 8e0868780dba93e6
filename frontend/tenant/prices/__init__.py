"""The prices of a tenant."""
