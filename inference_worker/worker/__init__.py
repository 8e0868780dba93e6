"""The Celery worker process around one resident engine."""
