"""Django apps of the platform: batches, outcomes, the request log and fleet operations."""
