"""Management API of webhooks, below /api/."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import exceptions, serializers
from rest_framework.request import Request
from rest_framework.response import Response

from tenants.actions import listeners
from tenants.actions import webhooks as actions
from tenants.api.idempotency import idempotent
from tenants.api.serializers import MAX_BIGINT, Query, StrictSerializer
from tenants.api.views import TenantView, check_query, find_first, validate_body
from tenants.models import WebhookAttempt, WebhookDelivery, WebhookEndpoint, WebhookEvent
from tenants.permissions import Permission
from tenants.webhooks.event_types import EVENT_TYPES
from tenants.webhooks.queries import deliveries, endpoints_with_last

READ, WRITE = Permission.WEBHOOKS_READ, Permission.WEBHOOKS_WRITE


class WebhookEndpointSerializer(serializers.ModelSerializer[WebhookEndpoint]):
    """An endpoint without its secret, with the result of its newest attempt."""

    last_at = serializers.DateTimeField(allow_null=True)
    last_status = serializers.IntegerField(allow_null=True)
    last_error = serializers.CharField(allow_null=True)

    class Meta:
        model = WebhookEndpoint
        fields: tuple[str, ...] = (
            *("id", "kind", "url", "description", "event_types", "active", "disabled_because", "failing_since"),
            *("previous_expires_at", "created_at", "last_at", "last_status", "last_error"),
        )
        read_only_fields = fields


class WebhookEndpointCreateSerializer(StrictSerializer):
    url = serializers.CharField(
        max_length=500, help_text="An https:// URL with a public IP address. Internal hosts are rejected."
    )
    description = serializers.CharField(max_length=200, allow_blank=True, required=False)
    event_types = serializers.ListField(
        child=serializers.ChoiceField(list(EVENT_TYPES)), required=False, help_text="Empty: all event types."
    )


class WebhookEndpointUpdateSerializer(WebhookEndpointCreateSerializer):
    active = serializers.BooleanField(required=False)


class WebhookSecretSerializer(serializers.Serializer[object]):
    secret = serializers.CharField(help_text="The signing secret (Standard Webhooks). It is shown only once.")


class WebhookEndpointWithSecretSerializer(WebhookEndpointSerializer):
    secret = serializers.CharField(help_text="The signing secret (Standard Webhooks). It is shown only once.")

    class Meta(WebhookEndpointSerializer.Meta):
        fields = (*WebhookEndpointSerializer.Meta.fields, "secret")
        read_only_fields = fields


class WebhookEventSerializer(serializers.ModelSerializer[WebhookEvent]):
    class Meta:
        model = WebhookEvent
        fields = ("id", "public_id", "event_type", "deduplication_key", "payload", "created_at")
        read_only_fields = fields


class WebhookEventQuery(Query):
    event_type = serializers.ChoiceField(list(EVENT_TYPES), required=False)


class WebhookAttemptSerializer(serializers.ModelSerializer[WebhookAttempt]):
    class Meta:
        model = WebhookAttempt
        fields = ("attempted_at", "status", "duration_ms", "error", "excerpt")
        read_only_fields = fields


class WebhookDeliverySerializer(serializers.ModelSerializer[WebhookDelivery]):
    event_public_id = serializers.CharField(source="event.public_id")
    event_type = serializers.CharField(source="event.event_type")
    url = serializers.CharField(source="endpoint.url")
    attempts = WebhookAttemptSerializer(many=True)

    class Meta:
        model = WebhookDelivery
        fields = (
            *("id", "event_id", "event_public_id", "event_type", "endpoint_id", "url", "state", "attempt_count"),
            *("next_attempt_at", "created_at", "attempts"),
        )
        read_only_fields = fields


class WebhookListenerSerializer(StrictSerializer):
    url = serializers.RegexField(
        r"^https?://\S+$",
        max_length=500,
        help_text="The URL that the listener posts to. The platform sends nothing to it, so it may be local.",
    )
    device = serializers.CharField(
        max_length=64, help_text="An ID of the machine. A listener of the same URL and device is continued."
    )
    event_types = serializers.ListField(
        child=serializers.ChoiceField(list(EVENT_TYPES)), required=False, help_text="Empty: all event types."
    )


class ListenerResultSerializer(serializers.Serializer[Any]):
    id = serializers.IntegerField(min_value=1, max_value=MAX_BIGINT, help_text="The delivery's ID.")
    attempt = serializers.IntegerField(min_value=1, max_value=100, help_text="`attempt` of the polled delivery.")
    status = serializers.IntegerField(
        min_value=100, max_value=999, allow_null=True, help_text="HTTP status of the response; `null`: no response."
    )
    duration_ms = serializers.IntegerField(min_value=0, max_value=2**31 - 1)
    error = serializers.CharField(
        max_length=200, allow_blank=True, required=False, help_text="Why there was no response."
    )
    excerpt = serializers.CharField(
        max_length=1024,
        allow_blank=True,
        required=False,
        trim_whitespace=False,
        help_text="Start of the response body.",
    )


class ListenerPollSerializer(StrictSerializer):
    results = serializers.ListField(
        child=ListenerResultSerializer(),
        required=False,
        max_length=listeners.MAX_POLLED,
        help_text="Results of polled deliveries.",
    )
    max_deliveries = serializers.IntegerField(
        min_value=0,
        max_value=listeners.MAX_POLLED,
        required=False,
        help_text=f"Most deliveries to return; default: {listeners.MAX_POLLED}.",
    )


class ListenerDeliverySerializer(serializers.Serializer[Any]):
    id = serializers.IntegerField()
    attempt = serializers.IntegerField()
    event_type = serializers.ChoiceField(list(EVENT_TYPES))
    headers = serializers.DictField(child=serializers.CharField(), help_text="Headers of the POST, with signatures.")
    body = serializers.CharField(help_text="Body of the POST.")


class ListenerDeliveriesSerializer(serializers.Serializer[Any]):
    deliveries = ListenerDeliverySerializer(many=True)


class DeliveryQuery(Query):
    names = {"endpoint": "endpoint_id", "event": "event_id"}  # noqa: RUF012
    endpoint = serializers.IntegerField(min_value=1, max_value=MAX_BIGINT, required=False)
    event = serializers.IntegerField(min_value=1, max_value=MAX_BIGINT, required=False)
    state = serializers.ChoiceField(WebhookDelivery.State.choices, required=False)


class EndpointView(TenantView):
    """Base of the views of one endpoint."""

    serializer_class = WebhookEndpointSerializer

    def representation(self, pk: int) -> dict[str, Any]:
        with self.scope():
            endpoint = find_first(endpoints_with_last(self.access.tenant.pk).filter(pk=pk))
        return dict(WebhookEndpointSerializer(endpoint).data)


class Endpoints(EndpointView):
    permissions: ClassVar = {"GET": READ, "POST": WRITE}

    @extend_schema(operation_id="webhooks", parameters=[Query], responses=WebhookEndpointSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return the webhook endpoints, each with the result of its newest attempt."""
        check_query(Query, request)
        with self.scope():
            return self.page(endpoints_with_last(self.access.tenant.pk), WebhookEndpointSerializer)

    def prepare(self, request: Request) -> None:
        """Check the URL before the transaction, because this can wait for a name server."""
        if request.method == "POST":
            self._url = actions.check_endpoint_url(validate_body(WebhookEndpointCreateSerializer, request.data)["url"])

    @extend_schema(
        operation_id="webhooks_create",
        request=WebhookEndpointCreateSerializer,
        responses={201: WebhookEndpointWithSecretSerializer},
    )
    @idempotent
    def post(self, request: Request) -> Response:
        """Create a webhook endpoint. The response contains its signing secret."""
        fields = validate_body(WebhookEndpointCreateSerializer, request.data) | {"url": self._url}
        endpoint, secret = actions.do_create_endpoint(self.access.tenant, **fields)
        return Response(self.representation(endpoint.pk) | {"secret": secret}, status=201)


@extend_schema(tags=["webhooks"])
class Listeners(EndpointView):
    permissions: ClassVar = {"POST": WRITE}

    @extend_schema(
        operation_id="webhook_listener_open",
        request=WebhookListenerSerializer,
        responses={201: WebhookEndpointWithSecretSerializer},
    )
    @idempotent
    def post(self, request: Request) -> Response:
        """Open a listener, which fetches events instead of receiving them. The response contains its signing secret.

        Events are stored for it while it polls, and for an hour after its last poll.
        """
        fields = validate_body(WebhookListenerSerializer, request.data)
        listener, secret = listeners.do_open_listener(self.access.tenant, **fields)
        return Response(self.representation(listener.pk) | {"secret": secret}, status=201)


@extend_schema(tags=["webhooks"])
class ListenerPoll(TenantView):
    permissions: ClassVar = {"POST": WRITE}

    @extend_schema(
        operation_id="webhook_listener_poll", request=ListenerPollSerializer, responses=ListenerDeliveriesSerializer
    )
    def post(self, request: Request, pk: int) -> Response:
        """Report results of a listener's deliveries, and return the next ones.

        Each has a lease of 2 minutes. Without a result it is returned again after that.
        """
        listener = self.find(WebhookEndpoint, pk)
        if listener.kind != WebhookEndpoint.Kind.LISTENER:
            raise exceptions.NotFound
        given = validate_body(ListenerPollSerializer, request.data)
        results = [listeners.ListenerResult(**result) for result in given.get("results", ())]
        number = given.get("max_deliveries", listeners.MAX_POLLED)
        leased = listeners.do_poll_listener(listener, results, max_deliveries=number)
        return Response({"deliveries": [delivery._asdict() for delivery in leased]})


class EndpointDetail(EndpointView):
    permissions: ClassVar = {"GET": READ, "PATCH": WRITE, "DELETE": WRITE}

    @extend_schema(operation_id="webhook")
    def get(self, request: Request, pk: int) -> Response:
        """Return the webhook endpoint."""
        return Response(self.representation(pk))

    @extend_schema(operation_id="webhook_update", request=WebhookEndpointUpdateSerializer)
    def patch(self, request: Request, pk: int) -> Response:
        """Change the endpoint, or disable or enable it."""
        row = self.find(WebhookEndpoint, pk)
        actions.do_update_endpoint(row, **validate_body(WebhookEndpointUpdateSerializer, request.data, partial=True))
        return Response(self.representation(pk))

    @extend_schema(operation_id="webhook_delete", responses={204: None})
    def delete(self, request: Request, pk: int) -> Response:
        """Delete the endpoint with its deliveries."""
        actions.do_delete_endpoint(self.find(WebhookEndpoint, pk))
        return Response(status=204)


class EndpointRotate(TenantView):
    serializer_class = WebhookSecretSerializer
    permissions: ClassVar = {"POST": WRITE}

    @extend_schema(operation_id="webhook_rotate", request=None)
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Rotate the secret. Events of the next day are signed with both secrets."""
        return Response({"secret": actions.do_rotate_webhook_secret(self.find(WebhookEndpoint, pk))})


class EndpointTest(TenantView):
    permissions: ClassVar = {"POST": WRITE}

    @extend_schema(operation_id="webhook_test", request=None, responses={201: WebhookDeliverySerializer})
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Send a test event to this endpoint only."""
        delivery = actions.do_send_test_event(self.find(WebhookEndpoint, pk))
        with self.scope():
            return Response(
                WebhookDeliverySerializer(deliveries(self.access.tenant.pk).get(pk=delivery.pk)).data, status=201
            )


@extend_schema(tags=["webhooks"])
class Events(TenantView):
    permissions: ClassVar = {"GET": READ}

    @extend_schema(
        operation_id="webhook_events", parameters=[WebhookEventQuery], responses=WebhookEventSerializer(many=True)
    )
    def get(self, request: Request) -> Response:
        """Return the events of the last 90 days, newest first, whether or not they were sent."""
        query = check_query(WebhookEventQuery, request)
        with self.scope():
            return self.page(self.rows(WebhookEvent).filter(**query.filters()), WebhookEventSerializer)


@extend_schema(tags=["webhooks"])
class EventDetail(TenantView):
    serializer_class = WebhookEventSerializer
    permissions: ClassVar = {"GET": READ}

    @extend_schema(operation_id="webhook_event")
    def get(self, request: Request, pk: int) -> Response:
        """Return the webhook event."""
        return Response(WebhookEventSerializer(self.find(WebhookEvent, pk)).data)


@extend_schema(tags=["webhooks"])
class Deliveries(TenantView):
    permissions: ClassVar = {"GET": READ}

    @extend_schema(
        operation_id="webhook_deliveries", parameters=[DeliveryQuery], responses=WebhookDeliverySerializer(many=True)
    )
    def get(self, request: Request) -> Response:
        """Return the deliveries with their attempts, newest first."""
        query = check_query(DeliveryQuery, request)
        with self.scope():
            return self.page(deliveries(self.access.tenant.pk).filter(**query.filters()), WebhookDeliverySerializer)


class DeliveryView(TenantView):
    """Base of the views of one delivery."""

    serializer_class = WebhookDeliverySerializer

    def delivery_response(self, pk: int) -> Response:
        with self.scope():
            delivery = find_first(deliveries(self.access.tenant.pk).filter(pk=pk))
            return Response(WebhookDeliverySerializer(delivery).data)


@extend_schema(tags=["webhooks"])
class DeliveryDetail(DeliveryView):
    permissions: ClassVar = {"GET": READ}

    @extend_schema(operation_id="webhook_delivery")
    def get(self, request: Request, pk: int) -> Response:
        """Return the webhook delivery."""
        return self.delivery_response(pk)


@extend_schema(tags=["webhooks"])
class DeliveryReplay(DeliveryView):
    permissions: ClassVar = {"POST": WRITE}

    @extend_schema(operation_id="webhook_replay", request=None, responses=WebhookDeliverySerializer)
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Send the event again, with the same ID."""
        actions.do_replay(self.find(WebhookDelivery, pk))
        return self.delivery_response(pk)
