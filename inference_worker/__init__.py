"""The inference worker: the engine and the Celery worker around it. It uses the broker and never the database."""
