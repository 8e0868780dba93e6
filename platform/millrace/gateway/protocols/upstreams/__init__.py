"""Requests to upstreams, built from requests in any dialect."""
