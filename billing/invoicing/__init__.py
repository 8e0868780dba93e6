"""Billing setup, drafts, invoices, corrections, re-ratings and document formats."""
