"""Members of the tenant, their roles, and invitations."""
