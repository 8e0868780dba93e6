"""The ledger: bookings, credits, the matching of payments, and the gate of prepaid tenants."""
