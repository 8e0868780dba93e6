"""Results of policies, limits and budgets: dry runs, comparisons with shadows, and limiting factors."""
