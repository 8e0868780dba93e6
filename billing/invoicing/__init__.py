"""Invoice lines, totals and document formats."""
