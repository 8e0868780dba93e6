"""The gateway's HTTP and WebSocket endpoints, one consumer each. millrace.gateway.routes maps URLs to them."""
