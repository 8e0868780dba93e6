"""How a gateway, which sees a key's secret and knows no Django, stores the key under the newest pepper."""

from django.db import migrations

# Under its tenant's lock, as the verbs do it, so that no snapshot is being compiled with the old hash meanwhile. What
# the snapshot says stays as it is: gateways need not be told.
REHASH = """
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
    UPDATE tenants_keysnapshot SET key_hash = new WHERE key_id = old_row.id;
    INSERT INTO tenants_auditentry
        (at, tenant_id, verb, actor, request_id, object_type, object_id, object_name, before, after)
    VALUES (clock_timestamp(), old_row.tenant_id, 'key.rehashed', 'gateway', '', 'apikey', old_row.id,
        old_row.name || ' (' || old_row.prefix || '…)',
        jsonb_build_object('pepper', old_row.pepper), jsonb_build_object('pepper', new_pepper));
    RETURN true;
END
$$
"""


class Migration(migrations.Migration):

    dependencies = [
        ('tenants', '0003_row_level_security'),
    ]

    operations = [
        migrations.RunSQL([REHASH], ["DROP FUNCTION tenants_rehash_key(bytea, bytea, text)"]),
    ]
