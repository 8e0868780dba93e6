"""The paged KV cache: blocks, prefix caching, pins and CPU offload."""
