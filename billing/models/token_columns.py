"""The columns of `TokenCounts`, in the tables of executions and in those of sums."""

from __future__ import annotations

from django.db import models


class ExecutionTokens(models.Model):
    """Tokens that an execution used, by class."""

    uncached = models.IntegerField()
    cache_read = models.IntegerField()
    cache_write_5m = models.IntegerField()
    cache_write_1h = models.IntegerField()
    output = models.IntegerField()

    class Meta:
        abstract = True


class PricedTokens(ExecutionTokens):
    """The counts of an execution that have prices."""

    answer_hit_input = models.IntegerField()
    answer_hit_output = models.IntegerField()
    searches = models.IntegerField(db_default=0, help_text="of a cross-encoder")

    class Meta:
        abstract = True


class TokenSums(models.Model):
    """Sums of the counts that have prices."""

    uncached = models.BigIntegerField()
    cache_read = models.BigIntegerField()
    cache_write_5m = models.BigIntegerField()
    cache_write_1h = models.BigIntegerField()
    output = models.BigIntegerField()
    answer_hit_input = models.BigIntegerField()
    answer_hit_output = models.BigIntegerField()
    searches = models.BigIntegerField(db_default=0, help_text="of cross-encoders")

    class Meta:
        abstract = True
