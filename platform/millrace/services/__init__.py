"""PostgreSQL and Valkey from Python wheels, run as plain child processes: no system package, no daemon."""
