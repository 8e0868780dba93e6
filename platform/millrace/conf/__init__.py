"""Configuration: environment, Django settings, URLs, the ASGI application, Celery and logging."""
