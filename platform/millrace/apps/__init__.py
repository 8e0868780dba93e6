"""Django apps of the platform: batches, feedback, the request log and fleet operations."""
