"""The operator's costs of executions, and what the tenants pay for them."""
