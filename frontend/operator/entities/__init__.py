"""Billing entities: the sellers on invoices, their tax rules, charts of accounts and journals."""
