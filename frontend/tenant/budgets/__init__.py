"""Budgets, quotas and rate limits of the organization, its projects, keys and members."""
