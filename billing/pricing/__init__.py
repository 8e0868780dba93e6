"""Published prices, compiled rate cards, exchange rates, and the prices of events."""
