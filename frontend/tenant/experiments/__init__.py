"""Experiments: the list, the form of a new one, and the results."""
