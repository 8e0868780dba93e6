"""Management API of users, for operators: access, operator rights and second factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from allauth.mfa.models import Authenticator
from django.db.models import Exists, OuterRef, Q, QuerySet
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from tenants import actions
from tenants.api.idempotency import idempotent
from tenants.api.operators import OperatorView
from tenants.api.serializers import Query
from tenants.api.views import check_query, find_first
from tenants.models import User
from tenants.reauthentication import SECOND_FACTORS

ACTIONS: dict[str, Callable[[User], bool]] = {
    "deactivate": actions.do_deactivate_user,
    "reactivate": actions.do_reactivate_user,
    "grant-operator": actions.do_grant_operator,
    "revoke-operator": actions.do_revoke_operator,
    "remove-second-factor": actions.do_remove_second_factor,
}


class UserSerializer(serializers.ModelSerializer[User]):
    is_operator = serializers.BooleanField(source="is_staff")
    has_second_factor = serializers.BooleanField()
    created_at = serializers.DateTimeField(source="date_joined")

    class Meta:
        model = User
        fields = (
            *("id", "email", "name", "is_active", "is_operator", "has_second_factor"),
            *("last_login", "created_at"),
        )
        read_only_fields = fields


class UserQuery(Query):
    names = {"is_operator": "is_staff"}  # noqa: RUF012
    is_active = serializers.BooleanField(required=False)
    is_operator = serializers.BooleanField(required=False)
    search = serializers.CharField(required=False, max_length=200, help_text="Part of the name or email address.")

    def rows(self) -> QuerySet[User]:
        """Return the users that match."""
        given = self.filters()
        typed = given.pop("search", "")
        users = with_second_factor().filter(**given)
        return users.filter(Q(email__icontains=typed) | Q(name__icontains=typed)) if typed else users


def with_second_factor() -> QuerySet[User]:
    """Return all users, with `has_second_factor`."""
    factor = Authenticator.objects.filter(user=OuterRef("pk"), type__in=SECOND_FACTORS)
    return User.objects.annotate(has_second_factor=Exists(factor))


class UserView(OperatorView):
    """Base of the views of users."""

    serializer_class = UserSerializer

    def user(self, pk: int) -> User:
        """Return a user.

        Raises:
            NotFound: the user does not exist.
        """
        return find_first(with_second_factor().filter(pk=pk))


class Users(UserView):
    @extend_schema(operation_id="operator_users", parameters=[UserQuery], responses=UserSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return all users, newest first."""
        query = check_query(UserQuery, request)
        return self.page(query.rows(), UserSerializer)


class UserOne(UserView):
    @extend_schema(operation_id="operator_user")
    def get(self, request: Request, pk: int) -> Response:
        """Return the user."""
        return Response(UserSerializer(self.user(pk)).data)


class UserActionView(UserView):
    action_name: ClassVar[str] = ""
    action_texts: ClassVar[dict[str, str]] = {
        "deactivate": "Deactivate the user.",
        "reactivate": "Reactivate the user.",
        "grant-operator": "Make the user an operator.",
        "revoke-operator": "Revoke the operator rights of the user.",
        "remove-second-factor": "Remove the second factor of the user.",
    }

    @extend_schema(request=None, responses=UserSerializer)
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        ACTIONS[self.action_name](self.user(pk))
        return Response(UserSerializer(self.user(pk)).data)
