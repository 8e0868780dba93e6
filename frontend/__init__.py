"""The console for operators and tenants."""
