"""Questions, answers and evidence of the semantic cache. A tenant sees only its own."""

from django.db import migrations, models

from tenants.isolation import rls


class Migration(migrations.Migration):

    dependencies = [
        ("request_log", "0006_retry_index"),
        ("tenants", "0002_row_level_security"),
    ]

    operations = [
        migrations.CreateModel(
            name="SemanticEntry",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("tenant_id", models.BigIntegerField()),
                ("scope", models.BinaryField(help_text="keyed digest of everything that must be equal: all but the last turn")),
                ("question_digest", models.BinaryField(help_text="keyed digest of the question")),
                ("vector", models.BinaryField(help_text="of the question, float16")),
                ("answer_digest", models.BinaryField(help_text="keyed digest of the normalized answer")),
                ("answer_vector", models.BinaryField(help_text="of the answer, float16; empty: the answer is too long")),
                ("answer_group", models.BigIntegerField(help_text="equal for entries with the same answer")),
                ("wrong", models.IntegerField(db_default=0, default=0, help_text="hits whose answer was wrong")),
                ("request_id", models.CharField(max_length=64)),
                ("question", models.BinaryField()),
                ("answer", models.BinaryField()),
                ("created_at", models.DateTimeField()),
                ("expires_at", models.DateTimeField()),
            ],
            options={
                "indexes": [
                    models.Index(fields=["tenant_id", "id"], name="request_log_semantic_tenant"),
                    models.Index(fields=["expires_at"], name="request_log_semantic_expires"),
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("tenant_id", "scope", "question_digest"), name="request_log_semantic_question"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="SemanticEvidence",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("tenant_id", models.BigIntegerField()),
                ("embedding", models.CharField(help_text="the embedding deployment, with its version", max_length=200)),
                ("band", models.SmallIntegerField()),
                ("correct", models.IntegerField(db_default=0, default=0)),
                ("wrong", models.IntegerField(db_default=0, default=0)),
                ("updated_at", models.DateTimeField()),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("tenant_id", "embedding", "band"), name="request_log_semantic_band")
                ],
            },
        ),
        rls.operations("request_log_semanticentry"),
        rls.operations("request_log_semanticevidence"),
    ]
