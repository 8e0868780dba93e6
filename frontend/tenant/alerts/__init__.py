"""Alerts: their history and acknowledgment, and the channels that send them."""
