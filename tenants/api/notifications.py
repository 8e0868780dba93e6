"""Management API of notifications, below /api/notifications."""

from __future__ import annotations

from typing import Any, ClassVar

from django.conf import settings
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from tenants.api.idempotency import idempotent
from tenants.api.serializers import MAX_BIGINT, Query, StrictSerializer
from tenants.api.views import TenantView, check_query, validate_body
from tenants.models import Notification
from tenants.notifications.kinds import NOTIFICATION_KINDS
from tenants.notifications.reading import MAX_MARKED, mark_read, viewer_of, visible_notifications
from tenants.permissions import Permission

KIND_CHOICES = [(name, kind.label) for name, kind in NOTIFICATION_KINDS.items() if not kind.is_for_operators]


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
        return f"{settings.MILLRACE.base_url}/t/{self.context['slug']}/{row.link}"


class NotificationQuery(Query):
    kind = serializers.ChoiceField(KIND_CHOICES, required=False)
    is_read = serializers.BooleanField(
        required=False, help_text="Only notifications that are read, or only unread ones."
    )


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
            context = {"slug": self.access.tenant.slug}
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
