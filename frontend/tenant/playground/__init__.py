"""The playground: requests to several models over the gateway's WebSocket."""
