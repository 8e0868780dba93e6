"""The margin: revenue and cost of executions, by month."""
