"""Models and workers: replicas and their cordons."""
