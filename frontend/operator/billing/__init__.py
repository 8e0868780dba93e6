"""Billing runs: the invoices of each month, from draft to paid."""
