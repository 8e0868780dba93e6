"""The data plane's endpoints, a consumer each."""
