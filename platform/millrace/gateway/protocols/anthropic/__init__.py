"""Anthropic's dialect: messages and token counting."""
