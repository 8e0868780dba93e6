"""The generator of docs/openapi.yaml.

The document has each route of the gateway, the schemas of request bodies from the types that the gateway reads them
into, descriptions from `operations.py`, and the schemas of responses from `responses.yaml`.
"""
