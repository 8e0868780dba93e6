-- The indexes of the request log before it was partitioned, on a copy without partitions.
ALTER TABLE benchmark_records ADD PRIMARY KEY (tenant_id, started_at, request_id);
CREATE INDEX ON benchmark_records (request_id);
CREATE INDEX ON benchmark_records (tenant_id, (request_id COLLATE "C"));
CREATE INDEX ON benchmark_records (tenant_id, started_at DESC) WHERE NOT (outcome = 'completed');
CREATE INDEX ON benchmark_records (tenant_id, retry_key, started_at) WHERE retry_key IS NOT NULL;
CREATE INDEX ON benchmark_records (tenant_id, replay_of) WHERE NOT (replay_of = '');
CREATE INDEX ON benchmark_records (tenant_id, started_at) INCLUDE (outcome, ttft_ms);
CREATE INDEX ON benchmark_records (tenant_id, started_at) WHERE cache_layer IN ('exact', 'semantic');
CREATE INDEX ON benchmark_records USING brin (started_at) WITH (autosummarize = on)
