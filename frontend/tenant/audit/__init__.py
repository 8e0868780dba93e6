"""The tenant's audit log."""
