"""The generators of docs/openapi.yaml and docs/management-openapi.yaml.

The first document has each route of the gateway, the schemas of request bodies from the types that the gateway reads,
descriptions from `operations.py`, and the schemas of responses from `responses.yaml`.
"""
