"""Usage events: ingestion, the settler, rollups, partitions, archives and reconciliation."""
