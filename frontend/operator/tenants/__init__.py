"""All tenants, for operators."""
