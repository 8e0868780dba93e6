"""Receivables: what tenants owe each billing entity, by days past due."""
