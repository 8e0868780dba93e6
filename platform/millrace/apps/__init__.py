"""Django apps of the platform: the request log and what is computed from it, deployments, health checks, alerts,
batches, feedback and experiments.
"""
