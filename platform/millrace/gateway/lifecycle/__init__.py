"""The request service, the batch runner and the request log."""
