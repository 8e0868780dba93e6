"""The parts of `millrace up`: the supervisor, the embedded PostgreSQL and Valkey, and demo data."""
