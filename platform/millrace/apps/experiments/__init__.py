"""Experiments on model names: results by arm, and the automatic stop. See docs/guides/experiments.md."""
