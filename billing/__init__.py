"""Metering, prices, budgets, invoices and the ledger."""
