"""Fleet health: health checks, cordons, the history of replicas and machine costs.

See docs/guides/operations.md.
"""
