"""Anthropic's dialect: messages and their count of tokens."""
