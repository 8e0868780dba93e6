"""The model catalog, and the router that turns a tenant's policy into candidates."""
