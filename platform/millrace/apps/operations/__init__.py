"""Fleet operations: status and history of replicas, cordons, machine costs and health checks.

See docs/guides/operations.md.
"""
