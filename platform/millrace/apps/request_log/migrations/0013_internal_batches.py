"""Mark the batches of warmed prompts and their files as internal."""

from django.db import migrations

from tenants.isolation import rls

_BATCHES = """
UPDATE batches_batch SET is_internal = true WHERE id IN (SELECT batch_id FROM request_log_warmedprompt)
"""
_FILES = """
UPDATE batches_file f SET is_internal = true FROM batches_batch b
WHERE b.is_internal AND f.tenant_id = b.tenant_id AND f.name IN (b.input_file, b.output_file, b.error_file)
"""


class Migration(migrations.Migration):

    dependencies = [
        ("request_log", "0012_prompt_digests"),
        ("batches", "0003_internal_batches"),
    ]

    operations = [
        rls.update_rows(_BATCHES, "UPDATE batches_batch SET is_internal = false WHERE is_internal"),
        rls.update_rows(_FILES, "UPDATE batches_file SET is_internal = false WHERE is_internal"),
    ]
