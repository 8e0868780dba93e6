"""Budget leases and reservations, in the gateway and in the settler."""
