"""Deployments: the models that the platform serves, and their states."""
