"""Notifications of members and operators: their kinds, how they are written, and what a viewer sees."""
