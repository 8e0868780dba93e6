"""Deployments: the models that the platform serves, and the status of the replicas that serve them.

See docs/guides/deployments.md.
"""
