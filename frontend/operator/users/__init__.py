"""All users, for operators."""
