"""Projects: the list, and one project with its keys and budgets."""
