"""Budget leases, reservations, alerts and forecasts."""
