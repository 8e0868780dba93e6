"""The inference worker: the engine, and the Celery worker around it. Knows the broker, never the database."""
