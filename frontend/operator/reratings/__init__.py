"""Re-ratings: corrected prices of past usage, and their credit and debit notes."""
