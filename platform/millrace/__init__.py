"""Millrace: a multi-tenant managed LLM inference platform."""
