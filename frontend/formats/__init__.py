"""Formats of dates and numbers that replace those of Django."""
