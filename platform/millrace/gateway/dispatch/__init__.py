"""From an admitted request to a replica and back: queue, placement, wake-ups, streams, monitor."""
