CREATE TRIGGER {{table}}_no_change BEFORE UPDATE OR DELETE ON {{table}}
    FOR EACH ROW EXECUTE FUNCTION tenants_refuse_change();
CREATE TRIGGER {{table}}_no_truncate BEFORE TRUNCATE ON {{table}}
    FOR EACH STATEMENT EXECUTE FUNCTION tenants_refuse_change();
REVOKE UPDATE, DELETE, TRUNCATE ON {{table}} FROM millrace_app, millrace_system;
