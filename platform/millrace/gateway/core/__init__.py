"""Types that all gateway packages share: requests, errors, IDs, tracing, body memory and database access.

This package imports nothing from the rest of the gateway.
"""
