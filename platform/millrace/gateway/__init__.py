"""The data plane: /v1 endpoints as Channels consumers, admission, dispatch and token streams."""
