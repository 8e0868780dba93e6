"""Prices of tokens and metered quantities, price terms, and the formats of price files. Does not read the database."""
