-- The rows without a tenant, and those of the open tenant scope.
CREATE POLICY own_or_all ON {{table}} USING (tenant_id IS NULL OR tenant_id = {{tenant}});
