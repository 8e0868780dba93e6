"""Management API of members and invitations."""

from __future__ import annotations

from typing import ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from tenants import actions
from tenants.api import serializers as s
from tenants.api.idempotency import idempotent
from tenants.api.views import TenantView, check_query, person, validate_body
from tenants.models import Invitation, Membership
from tenants.permissions import Permission


class _MemberView(TenantView):
    def require_for(self, request: Request, *roles: str) -> None:
        """Require the permission to add, change or remove owners if one of the roles is owner."""
        if Membership.Role.OWNER in roles:
            self.require(request, Permission.OWNERS_WRITE)


class Members(_MemberView):
    permissions: ClassVar = {"GET": Permission.MEMBERS_READ}

    @extend_schema(operation_id="members", parameters=[s.MemberQuery], responses=s.MemberSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return the members and their roles. Users join by invitation."""
        query = check_query(s.MemberQuery, request)
        with self.scope():
            return self.page(self.rows(Membership).select_related("user").filter(**query.filters()), s.MemberSerializer)


class MemberDetail(_MemberView):
    serializer_class = s.MemberSerializer
    permissions: ClassVar = {
        "GET": Permission.MEMBERS_READ,
        "PATCH": Permission.MEMBERS_WRITE,
        "DELETE": Permission.MEMBERS_WRITE,
    }

    @extend_schema(operation_id="member")
    def get(self, request: Request, pk: int) -> Response:
        """Return the member."""
        return Response(s.MemberSerializer(self.find(Membership, pk, "user")).data)

    @extend_schema(operation_id="member_update", request=s.MemberUpdateSerializer)
    def patch(self, request: Request, pk: int) -> Response:
        """Change the member's role."""
        member = self.find(Membership, pk, "user")
        role = validate_body(s.MemberUpdateSerializer, request.data)["role"]
        self.require_for(request, member.role, role)
        return Response(s.MemberSerializer(actions.do_change_role(member, role)).data)

    @extend_schema(operation_id="member_remove", responses={204: None})
    def delete(self, request: Request, pk: int) -> Response:
        """Remove the member. Keys that the member created remain, because they belong to projects."""
        member = self.find(Membership, pk)
        self.require_for(request, member.role)
        actions.do_remove_member(member)
        return Response(status=204)


@extend_schema(tags=["members"])
class Invitations(_MemberView):
    permissions: ClassVar = {"GET": Permission.MEMBERS_READ, "POST": Permission.MEMBERS_WRITE}

    @extend_schema(
        operation_id="invitations", parameters=[s.InvitationQuery], responses=s.InvitationSerializer(many=True)
    )
    def get(self, request: Request) -> Response:
        """Return the invitations, including accepted and expired ones, newest first."""
        query = check_query(s.InvitationQuery, request)
        with self.scope():
            rows = self.rows(Invitation).select_related("outbox_email").filter(**query.filters())
            return self.page(rows, s.InvitationSerializer)

    @extend_schema(
        operation_id="invitations_create", request=s.InvitationCreateSerializer, responses={201: s.InvitationSerializer}
    )
    @idempotent
    def post(self, request: Request) -> Response:
        """Invite a user by email. It replaces an open invitation to the same email address."""
        fields = validate_body(s.InvitationCreateSerializer, request.data)
        self.require_for(request, fields["role"])
        invitation = actions.do_invite(self.access.tenant, **fields, by=person(request))
        return Response(s.InvitationSerializer(invitation).data, status=201)


@extend_schema(tags=["members"])
class InvitationDetail(_MemberView):
    serializer_class = s.InvitationSerializer
    permissions: ClassVar = {"GET": Permission.MEMBERS_READ, "DELETE": Permission.MEMBERS_WRITE}

    @extend_schema(operation_id="invitation")
    def get(self, request: Request, pk: int) -> Response:
        """Return the invitation."""
        return Response(s.InvitationSerializer(self.find(Invitation, pk, "outbox_email")).data)

    @extend_schema(operation_id="invitation_revoke", responses={204: None})
    def delete(self, request: Request, pk: int) -> Response:
        """Revoke the invitation."""
        actions.do_revoke_invitation(self.find(Invitation, pk))
        return Response(status=204)
