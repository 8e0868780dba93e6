"""Management API of upstream credentials: a tenant's own, and the platform's. No response contains a secret."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from tenants.actions import credentials as actions
from tenants.api.idempotency import idempotent
from tenants.api.operators import OperatorView
from tenants.api.serializers import MAX_BIGINT, Query, StrictSerializer
from tenants.api.views import TenantView, check_query, find_first, validate_body
from tenants.models import MAX_SECRET_LENGTH, UpstreamCredential
from tenants.permissions import Permission

READ, WRITE = Permission.CREDENTIALS_READ, Permission.CREDENTIALS_WRITE


class PlatformCredentialSerializer(serializers.ModelSerializer[UpstreamCredential]):
    """A credential of the platform, without its secret."""

    class Meta:
        model = UpstreamCredential
        fields: tuple[str, ...] = (
            *("id", "name", "daily_spend_limit_nano", "max_concurrency", "version", "encryption_key_id"),
            *("created_at", "rotated_at"),
        )
        read_only_fields = fields


class TenantCredentialSerializer(serializers.ModelSerializer[UpstreamCredential]):
    """A tenant's own credential, without its secret."""

    models = serializers.ListField(child=serializers.CharField(), source="model_names", read_only=True)

    class Meta:
        model = UpstreamCredential
        fields: tuple[str, ...] = (
            *("id", "name", "models", "daily_spend_limit_nano", "max_concurrency", "version"),
            *("created_at", "rotated_at"),
        )
        read_only_fields = fields


class CredentialRotationSerializer(StrictSerializer):
    secret = serializers.CharField(
        max_length=MAX_SECRET_LENGTH,
        write_only=True,
        trim_whitespace=False,
        help_text="API key at the upstream. It is stored encrypted and never shown again.",
    )


class PlatformCredentialUpdateSerializer(StrictSerializer):
    name = serializers.CharField(max_length=64, help_text="1 to 64 of a-z 0-9 . _ -")
    daily_spend_limit_nano = serializers.IntegerField(
        required=False, allow_null=True, min_value=0, max_value=MAX_BIGINT, help_text="Nano-USD per day (UTC)."
    )
    max_concurrency = serializers.IntegerField(
        required=False, allow_null=True, min_value=1, max_value=100_000, help_text="Concurrent requests."
    )


class TenantCredentialUpdateSerializer(PlatformCredentialUpdateSerializer):
    models = serializers.ListField(
        child=serializers.CharField(max_length=64),
        source="model_names",
        max_length=actions.MAX_MODELS,
        help_text="Models whose requests use this credential instead of the platform's.",
    )


class PlatformCredentialCreateSerializer(PlatformCredentialUpdateSerializer, CredentialRotationSerializer):
    pass


class TenantCredentialCreateSerializer(TenantCredentialUpdateSerializer, CredentialRotationSerializer):
    pass


class CredentialReencryptionSerializer(serializers.Serializer[Any]):
    changed = serializers.IntegerField(help_text="Credentials that had an older encryption key.")


@extend_schema(tags=["upstream credentials"])
class OwnCredentials(TenantView):
    permissions: ClassVar = {"GET": READ, "POST": WRITE}

    @extend_schema(operation_id="credentials", parameters=[Query], responses=TenantCredentialSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return the tenant's own upstream credentials, newest first, without their secrets."""
        check_query(Query, request)
        with self.scope():
            return self.page(self.rows(UpstreamCredential), TenantCredentialSerializer)

    @extend_schema(
        operation_id="credentials_create",
        request=TenantCredentialCreateSerializer,
        responses={201: TenantCredentialSerializer},
    )
    @idempotent
    def post(self, request: Request) -> Response:
        """Store an upstream credential of the tenant. Its requests for `models` use it instead of the platform's."""
        row = actions.do_create_credential(
            self.access.tenant, **validate_body(TenantCredentialCreateSerializer, request.data)
        )
        return Response(TenantCredentialSerializer(row).data, status=201)


@extend_schema(tags=["upstream credentials"])
class OwnCredentialDetail(TenantView):
    serializer_class = TenantCredentialSerializer
    permissions: ClassVar = {"GET": READ, "PATCH": WRITE, "DELETE": WRITE}

    @extend_schema(operation_id="credential")
    def get(self, request: Request, pk: int) -> Response:
        """Return the credential."""
        return Response(TenantCredentialSerializer(self.find(UpstreamCredential, pk)).data)

    @extend_schema(operation_id="credential_update", request=TenantCredentialUpdateSerializer)
    def patch(self, request: Request, pk: int) -> Response:
        """Change the name, the models or the limits. To replace the secret, rotate the credential."""
        row = self.find(UpstreamCredential, pk)
        row = actions.do_update_credential(
            row, **validate_body(TenantCredentialUpdateSerializer, request.data, partial=True)
        )
        return Response(TenantCredentialSerializer(row).data)

    @extend_schema(operation_id="credential_remove", responses={204: None})
    def delete(self, request: Request, pk: int) -> Response:
        """Remove the credential. Requests for its models use the platform's again."""
        actions.do_remove_credential(self.find(UpstreamCredential, pk))
        return Response(status=204)


@extend_schema(tags=["upstream credentials"])
class OwnCredentialRotate(TenantView):
    serializer_class = TenantCredentialSerializer
    permissions: ClassVar = {"POST": WRITE}

    @extend_schema(operation_id="credential_rotate", request=CredentialRotationSerializer)
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Replace the secret. Workers use the new one within seconds."""
        row = self.find(UpstreamCredential, pk)
        row = actions.do_rotate_credential(row, validate_body(CredentialRotationSerializer, request.data)["secret"])
        return Response(TenantCredentialSerializer(row).data)


class PlatformCredentialView(OperatorView):
    """Base of the views of the platform's credentials."""

    serializer_class = PlatformCredentialSerializer
    pagination_class = None

    def find_credential(self, pk: int) -> UpstreamCredential:
        with self.scope():
            return find_first(UpstreamCredential.objects.all_tenants().filter(pk=pk, tenant=None))


class PlatformCredentials(PlatformCredentialView):
    @extend_schema(operation_id="operator_credentials", responses=PlatformCredentialSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return the platform's upstream credentials, without their secrets."""
        with self.scope():
            rows = UpstreamCredential.objects.all_tenants().filter(tenant=None).order_by("name")
            return Response(PlatformCredentialSerializer(rows, many=True).data)

    @extend_schema(
        operation_id="operator_credentials_create",
        request=PlatformCredentialCreateSerializer,
        responses={201: PlatformCredentialSerializer},
    )
    @idempotent
    def post(self, request: Request) -> Response:
        """Store an upstream credential of the platform, for deployments to name."""
        row = actions.do_create_credential(None, **validate_body(PlatformCredentialCreateSerializer, request.data))
        return Response(PlatformCredentialSerializer(row).data, status=201)


class PlatformCredentialsReencrypt(PlatformCredentialView):
    @extend_schema(
        operation_id="operator_credentials_reencrypt", request=None, responses=CredentialReencryptionSerializer
    )
    @idempotent
    def post(self, request: Request) -> Response:
        """Encrypt all credentials, also those of tenants, with the newest key of MILLRACE_CREDENTIAL_KEYS."""
        changed: Any = {"changed": actions.do_reencrypt_credentials()}
        return Response(CredentialReencryptionSerializer(changed).data)


class PlatformCredentialDetail(PlatformCredentialView):
    @extend_schema(operation_id="operator_credential")
    def get(self, request: Request, pk: int) -> Response:
        """Return an upstream credential of the platform, without its secret."""
        return Response(PlatformCredentialSerializer(self.find_credential(pk)).data)

    @extend_schema(operation_id="operator_credential_update", request=PlatformCredentialUpdateSerializer)
    def patch(self, request: Request, pk: int) -> Response:
        """Change the name or the limits. To replace the secret, rotate the credential."""
        row = self.find_credential(pk)
        row = actions.do_update_credential(
            row, **validate_body(PlatformCredentialUpdateSerializer, request.data, partial=True)
        )
        return Response(PlatformCredentialSerializer(row).data)

    @extend_schema(operation_id="operator_credential_remove", responses={204: None})
    def delete(self, request: Request, pk: int) -> Response:
        """Remove a credential that no deployment uses."""
        actions.do_remove_credential(self.find_credential(pk))
        return Response(status=204)


class PlatformCredentialRotate(PlatformCredentialView):
    @extend_schema(
        operation_id="operator_credential_rotate",
        request=CredentialRotationSerializer,
        responses=PlatformCredentialSerializer,
    )
    @idempotent
    def post(self, request: Request, pk: int) -> Response:
        """Replace the secret. Workers use the new one within seconds."""
        row = self.find_credential(pk)
        row = actions.do_rotate_credential(row, validate_body(CredentialRotationSerializer, request.data)["secret"])
        return Response(PlatformCredentialSerializer(row).data)
