"""Settings of the tenant: name, data retention, billing profile and deletion."""
