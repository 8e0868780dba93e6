"""The engine: scheduler, paged KV cache, models and sampling. Imports no Django, Celery or broker client."""
