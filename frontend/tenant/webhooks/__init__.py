"""Webhook endpoints of the tenant and their deliveries."""
