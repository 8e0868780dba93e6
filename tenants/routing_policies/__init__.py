"""Routing policies of tenants."""
