"""Fleet: utilization of the workers and cost of their tokens."""
