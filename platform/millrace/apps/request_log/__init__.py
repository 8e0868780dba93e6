"""The request log: a record of each request as its gateway saw it. See docs/reference/requests.md."""
