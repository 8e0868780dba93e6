"""Organizations, projects, members and API keys: who may do what."""
