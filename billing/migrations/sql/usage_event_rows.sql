-- Without WITH CHECK, since only `millrace_system` inserts events. Partitions get the same policy.
CREATE POLICY tenant_rows ON billing_usageevent USING (tenant_id = {{tenant}});
