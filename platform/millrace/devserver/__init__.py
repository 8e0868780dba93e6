"""Downloads of models from the hub."""
