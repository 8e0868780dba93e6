"""Checks of the project's own conventions, run by `make lint`."""
