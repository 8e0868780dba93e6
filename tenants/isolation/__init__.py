"""Tenant isolation: scopes, row-level security and database roles."""
