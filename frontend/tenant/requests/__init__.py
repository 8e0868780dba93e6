"""The request log, and the details of each request."""
