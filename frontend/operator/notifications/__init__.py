"""Notifications of operators."""
