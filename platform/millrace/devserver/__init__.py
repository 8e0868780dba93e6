"""`millrace up`: the supervisor, embedded PostgreSQL and Valkey, and demo data."""
