-- The rows of the open tenant scope.
CREATE POLICY tenant_rows ON {{table}} USING ({{column}} = {{tenant}}) WITH CHECK ({{column}} = {{tenant}});
