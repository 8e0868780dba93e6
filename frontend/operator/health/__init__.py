"""Health issues, on the first screen of operators."""
