"""Routing: the router turns a model name and the tenant's routing policy into candidate deployments."""
