"""Screens of the operator, one package each."""
