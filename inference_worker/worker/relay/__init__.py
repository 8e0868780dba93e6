"""Relays: engine clients whose model runs at an OpenAI- or Anthropic-compatible server."""
