"""API keys: compiled snapshots, IP allow-lists and playground tokens."""
