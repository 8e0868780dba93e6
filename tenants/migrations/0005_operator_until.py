"""Store when a user was last deactivated as an operator, or lost the right. The audit log has it for earlier changes."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations, models

from tenants.isolation.db_roles import SYSTEM
from tenants.migration_operations import SqlFiles, combine

SQL = SqlFiles(__file__)
FROM_AUDIT_LOG = """
UPDATE tenants_user SET operator_until = ended.at
FROM (
    SELECT entry.object_id, max(entry.created_at) AS at
    FROM tenants_auditentry entry JOIN tenants_user person ON person.id = entry.object_id
    WHERE entry.object_type = 'user' AND (
        entry.action = 'user.operator_revoked' OR entry.action = 'user.deactivated' AND person.is_staff
    )
    GROUP BY entry.object_id
) ended WHERE ended.object_id = tenants_user.id
"""


class Migration(migrations.Migration):
    dependencies: ClassVar = [("tenants", "0004_stored_texts")]

    operations: ClassVar = [
        migrations.AddField(
            model_name="user",
            name="operator_until",
            field=models.DateTimeField(
                editable=False,
                help_text="when the user was last deactivated as an operator, or lost the right",
                null=True,
            ),
        ),
        combine(
            migrations.RunSQL(
                [f"SET LOCAL ROLE {SYSTEM}", FROM_AUDIT_LOG, "RESET ROLE"],
                [],
            ),
            SQL.functions("tenants_note_operator_end"),
        ),
    ]
