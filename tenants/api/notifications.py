"""Management API of notifications, below /api/notifications, and of operators, below /api/operator/notifications."""

from __future__ import annotations

from typing import Any, ClassVar

from django.conf import settings
from drf_spectacular.utils import extend_schema
from rest_framework import exceptions, serializers
from rest_framework.request import Request
from rest_framework.response import Response

from tenants.actions.notifications import ChosenChannels, channels_of, do_set_notification_channels
from tenants.api.idempotency import idempotent
from tenants.api.operators import OperatorView
from tenants.api.serializers import MAX_BIGINT, Query, StrictSerializer
from tenants.api.views import TenantView, check_query, person, validate_body
from tenants.models import Notification, User
from tenants.notifications.kinds import NOTIFICATION_KINDS, kinds_of
from tenants.notifications.reading import MAX_MARKED, mark_read, viewer_of, visible_notifications
from tenants.permissions import Permission

KIND_CHOICES = [(name, kind.label) for name, kind in NOTIFICATION_KINDS.items() if not kind.is_for_operators]
OPERATOR_KIND_CHOICES = [(kind.name, kind.label) for kind in kinds_of(None)]


class NotificationSerializer(serializers.ModelSerializer[Notification]):
    """A notification that the caller's role sees."""

    kind = serializers.ChoiceField(KIND_CHOICES)
    text = serializers.CharField()
    url = serializers.SerializerMethodField(help_text="The page of its object in the console.")
    is_read = serializers.BooleanField(help_text="Whether the caller has marked it as read.")

    class Meta:
        model = Notification
        fields = ("id", "kind", "text", "url", "is_read", "created_at")
        read_only_fields = fields

    def get_url(self, row: Notification) -> str:
        return f"{settings.MILLRACE.base_url}/{self.context['root']}/{row.link}"


class OperatorNotificationSerializer(NotificationSerializer):
    """A notification of operators."""

    kind = serializers.ChoiceField(OPERATOR_KIND_CHOICES)


class NotificationQuery(Query):
    kind = serializers.ChoiceField(KIND_CHOICES, required=False)
    is_read = serializers.BooleanField(
        required=False, help_text="Only notifications that are read, or only unread ones."
    )


class OperatorNotificationQuery(Query):
    kind = serializers.ChoiceField(OPERATOR_KIND_CHOICES, required=False)
    is_read = serializers.BooleanField(
        required=False, help_text="Only notifications that are read, or only unread ones."
    )


class NotificationChannelSerializer(serializers.Serializer[Any]):
    """Where a user receives the notifications of a kind."""

    kind = serializers.ChoiceField(OPERATOR_KIND_CHOICES)
    in_console = serializers.BooleanField()
    by_email = serializers.BooleanField()


class NotificationChannelsSerializer(StrictSerializer):
    channels = NotificationChannelSerializer(many=True, help_text="Those of other kinds stay.")


class ReadNotificationsSerializer(StrictSerializer):
    ids = serializers.ListField(
        child=serializers.IntegerField(min_value=1, max_value=MAX_BIGINT),
        min_length=1,
        max_length=MAX_MARKED,
        help_text="IDs of the notifications. Unknown ones are ignored.",
    )


class MarkedNotificationsSerializer(serializers.Serializer[Any]):
    marked = serializers.IntegerField(help_text="Number of the notifications that were unread.")


@extend_schema(tags=["notifications"])
class Notifications(TenantView):
    permissions: ClassVar = {"GET": Permission.TENANT_READ}

    @extend_schema(
        operation_id="notifications", parameters=[NotificationQuery], responses=NotificationSerializer(many=True)
    )
    def get(self, request: Request) -> Response:
        """Return the notifications that the caller's role sees, newest first."""
        query = check_query(NotificationQuery, request)
        with self.scope():
            rows = visible_notifications(viewer_of(request.user, self.access))
            found = self.paginate_queryset(rows.filter(**query.filters()))
            context = {"root": f"t/{self.access.tenant.slug}"}
            return self.get_paginated_response(NotificationSerializer(found or [], many=True, context=context).data)


@extend_schema(tags=["notifications"])
class NotificationsRead(TenantView):
    permissions: ClassVar = {"POST": Permission.TENANT_READ}

    @extend_schema(
        operation_id="notifications_read",
        request=ReadNotificationsSerializer,
        responses=MarkedNotificationsSerializer,
    )
    @idempotent
    def post(self, request: Request) -> Response:
        """Mark notifications as read by the caller. Other users and keys still see them as unread."""
        ids = validate_body(ReadNotificationsSerializer, request.data)["ids"]
        with self.scope():
            marked = mark_read(viewer_of(request.user, self.access), ids)
        return Response({"marked": marked})


@extend_schema(tags=["operators"])
class OperatorNotifications(OperatorView):
    @extend_schema(
        operation_id="operator_notifications",
        parameters=[OperatorNotificationQuery],
        responses=OperatorNotificationSerializer(many=True),
    )
    def get(self, request: Request) -> Response:
        """Return the notifications of operators, newest first."""
        query = check_query(OperatorNotificationQuery, request)
        with self.scope():
            rows = visible_notifications(viewer_of(request.user, None))
            found = self.paginate_queryset(rows.filter(**query.filters()))
            serializer = OperatorNotificationSerializer(found or [], many=True, context={"root": "operator"})
            return self.get_paginated_response(serializer.data)


@extend_schema(tags=["operators"])
class OperatorNotificationsRead(OperatorView):
    @extend_schema(
        operation_id="operator_notifications_read",
        request=ReadNotificationsSerializer,
        responses=MarkedNotificationsSerializer,
    )
    @idempotent
    def post(self, request: Request) -> Response:
        """Mark notifications of operators as read by the caller. Other operators still see them as unread."""
        ids = validate_body(ReadNotificationsSerializer, request.data)["ids"]
        with self.scope():
            marked = mark_read(viewer_of(request.user, None), ids)
        return Response({"marked": marked})


@extend_schema(tags=["operators"])
class OperatorNotificationChannels(OperatorView):
    serializer_class = NotificationChannelSerializer
    pagination_class = None

    @extend_schema(operation_id="operator_notification_channels", responses=NotificationChannelSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return the caller's channels of each kind of operators' notifications."""
        return self._channels_response(request)

    @extend_schema(
        operation_id="operator_notification_channels_update",
        request=NotificationChannelsSerializer,
        responses=NotificationChannelSerializer(many=True),
    )
    def patch(self, request: Request) -> Response:
        """Set the caller's channels of some kinds, and return those of all kinds."""
        given = validate_body(NotificationChannelsSerializer, request.data, partial=True)["channels"]
        rows = [validate_body(NotificationChannelSerializer, row) for row in given]  # each is complete
        wanted = {row["kind"]: ChosenChannels(row["in_console"], row["by_email"]) for row in rows}
        do_set_notification_channels(None, self._operator(request), wanted)
        return self._channels_response(request)

    def _operator(self, request: Request) -> User:
        if (operator := person(request)) is None:
            raise exceptions.NotFound
        return operator

    def _channels_response(self, request: Request) -> Response:
        with self.scope():
            channels = channels_of(None, self._operator(request), None)
        rows = [{"kind": kind.name, **chosen._asdict()} for kind, chosen in channels]
        return Response(NotificationChannelSerializer(rows, many=True).data)
