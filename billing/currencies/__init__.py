"""Amounts, the codes of currencies and countries, and the units of payment providers."""
