"""What a model needs of a machine: the size of its KV cache, the minimum costs of a step, and whether it fits."""
