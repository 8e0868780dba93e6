"""Formats of form fields: dates as browsers send them, and numbers with a point."""

DATE_INPUT_FORMATS = ["%Y-%m-%d"]
DECIMAL_SEPARATOR = "."
THOUSAND_SEPARATOR = ""
NUMBER_GROUPING = 0
