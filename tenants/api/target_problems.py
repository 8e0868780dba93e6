"""Serializers of models that cannot serve requests, in policies and experiments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rest_framework import serializers

from tenants.routing_policies.target_checks import ModelObstacle, TargetChecks, TargetProblem

TARGET_PROBLEM_CODES = [obstacle.value for obstacle in ModelObstacle]


class TargetProblemSerializer(serializers.Serializer[TargetProblem]):
    """A named model that cannot serve your requests."""

    place = serializers.CharField(help_text="Path of the model's name, such as `$.rules[0].targets[1].model`.")
    model = serializers.CharField()
    code = serializers.ChoiceField(TARGET_PROBLEM_CODES, source="obstacle", help_text="Reason.")
    message = serializers.CharField()
    is_blocking = serializers.BooleanField(help_text="With such a problem, nothing can be published or started.")


class WithProblems(serializers.Serializer[Any]):
    """The field `problems`. The models of all rows of a response are checked once."""

    def problem_fields(self, problems: Iterable[TargetProblem]) -> list[dict[str, Any]]:
        return [dict(TargetProblemSerializer(problem).data) for problem in problems]

    def target_checks(self, tenant_id: int) -> TargetChecks:
        context: Any = self.context  # context of all rows of a list
        checks: TargetChecks = context.setdefault("target_checks", TargetChecks(tenant_id))
        return checks
