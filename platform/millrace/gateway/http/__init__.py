"""HTTP and WebSocket consumers, uploads, and the endpoints."""
