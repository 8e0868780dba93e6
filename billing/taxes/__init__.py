"""Tax rules and their rates, and the check of VAT IDs."""
