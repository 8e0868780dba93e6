-- Locks the tenant as actions do, so that no snapshot is compiled with the old hash at the same time. The snapshot's
-- contents do not change, so gateways are not notified.
CREATE FUNCTION tenants_rehash_key(old bytea, new bytea, new_pepper text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    old_row tenants_apikey;
BEGIN
    SELECT * INTO old_row FROM tenants_apikey WHERE key_hash = old;
    PERFORM FROM tenants_tenant WHERE id = old_row.tenant_id FOR NO KEY UPDATE;
    UPDATE tenants_apikey SET key_hash = new, pepper = new_pepper WHERE id = old_row.id AND key_hash = old;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE tenants_apikeysnapshot SET key_hash = new WHERE key_id = old_row.id;
    INSERT INTO tenants_auditentry
        (created_at, tenant_id, action, actor, request_id, object_type, object_id, object_name, before, after)
    VALUES (clock_timestamp(), old_row.tenant_id, 'key.rehashed', 'gateway', '', 'apikey', old_row.id,
        old_row.name || ' (' || old_row.prefix || '…)',
        jsonb_build_object('pepper', old_row.pepper), jsonb_build_object('pepper', new_pepper));
    RETURN true;
END
$$;
