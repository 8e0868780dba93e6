"""The story of each request as its gateway saw it. See docs/requests.md."""
