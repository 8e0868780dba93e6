"""Notifications of a tenant's members."""
