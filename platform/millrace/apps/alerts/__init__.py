"""Alert rules: conditions of a tenant or the platform that are checked every minute, and their alerts."""
