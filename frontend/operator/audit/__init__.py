"""The audit log of all tenants and of the platform itself."""
