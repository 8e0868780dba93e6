"""API keys and their projects: permissions, limits and cost."""
