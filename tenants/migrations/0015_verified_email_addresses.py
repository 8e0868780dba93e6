"""Store each user's email address as verified, and delete all other addresses, which no page shows or verifies.

`User.save` does the same from now on. If addresses differ only in case, the user with the lower-case one gets the row.
The reverse keeps the rows, which the previous release uses too.
"""

from django.db import migrations

from tenants.isolation import rls

FORWARD = """
DELETE FROM account_emailconfirmation WHERE email_address_id IN (
    SELECT address.id FROM account_emailaddress address JOIN tenants_user ON tenants_user.id = user_id
    WHERE address.email <> lower(tenants_user.email)
);
DELETE FROM account_emailaddress address USING tenants_user
    WHERE tenants_user.id = user_id AND address.email <> lower(tenants_user.email);
INSERT INTO account_emailaddress (user_id, email, verified, "primary")
    SELECT DISTINCT ON (lower(email)) id, lower(email), true, true FROM tenants_user WHERE email <> ''
    ORDER BY lower(email), email <> lower(email), id
    ON CONFLICT (user_id, email) DO UPDATE SET verified = true, "primary" = true
"""


class Migration(migrations.Migration):

    dependencies = [
        ('account', '0009_emailaddress_unique_primary_email'),
        ('tenants', '0014_tenant_cache_warming'),
    ]

    operations = [rls.update_rows(FORWARD, "SELECT")]
