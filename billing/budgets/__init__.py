"""Budgets, alerts and forecasts."""
