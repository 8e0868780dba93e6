"""Invoices of a tenant: the list, each document, and the usage behind its lines."""
