"""Model aliases: routing policies, their versions, and dry runs of changes."""
