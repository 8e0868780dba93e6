"""Screens of a tenant, one package each."""
