-- A foreign key to a row of the same tenant.
ALTER TABLE {{table}} ADD CONSTRAINT {{table}}_{{column}}_of_tenant
    FOREIGN KEY ({{column}}, tenant_id) REFERENCES {{referenced}} (id, tenant_id);
