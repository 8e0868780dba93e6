"""Alerts: health issues and budget alerts of all tenants."""
