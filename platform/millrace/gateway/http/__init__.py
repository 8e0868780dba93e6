"""HTTP and WebSocket: the base class of the endpoints, uploads, and the endpoints themselves.

Each request is handled by a new `HttpConsumer` (consumer.py). It authenticates the request, receives the body, calls
the endpoint's `handle` and sends the response or the error.
"""
