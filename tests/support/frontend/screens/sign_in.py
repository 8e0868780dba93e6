"""Pages outside of the console's layout: sign-in, second factor, password reset, invitation and the user's account."""

from __future__ import annotations

from typing import Any

from tests.support.frontend.console import PASSKEY_URL, Screen, World, register


def prepare(world: World) -> None:
    from tenants.invitations import token  # here: Django is not set up on import
    from tenants.isolation.scopes import tenant_scope
    from tenants.models import Invitation, User

    tenant = world.tenants["populated"]
    with tenant_scope(tenant):
        invitation = Invitation.objects.for_tenant(tenant).get(pk=world.rows["populated.invitation"])
    world.rows["populated.invitation_token"] = token(invitation)
    world.rows["populated.reset_key"] = reset_key(User.objects.get(email="readonly@acme.example"))


def reset_key(user: object) -> str:
    """Return the part of the link that allows a user to set a new password."""
    from allauth.account.forms import default_token_generator  # here: Django is not set up on import
    from allauth.account.utils import user_pk_to_url_str

    return f"{user_pk_to_url_str(user)}-{default_token_generator.make_token(user)}"


def _open_invitation(tenant: Any) -> str:
    from tenants.invitations import token
    from tenants.models import Invitation

    return token(Invitation.objects.for_tenant(tenant).filter(accepted_at=None, revoked_at=None)[0])


def _reset_key_of_owner(tenant: Any) -> str:
    from tenants.models import Membership

    return reset_key(Membership.objects.for_tenant(tenant).select_related("user").filter(role="owner")[0].user)


def standalone(name: str, url: str, queries: int, who: str = "visitor") -> Screen:
    return Screen(name, url, queries, who, ("populated",), has_layout=False, public_url=PASSKEY_URL)


register(
    standalone("sign-in", "/login", 1),
    standalone("sign-in-second-factor", "/account/mfa/authenticate/", 8, "pending"),
    standalone("password-reset", "/account/password/reset", 1),
    standalone("password-reset-sent", "/account/password/reset/sent", 1),
    standalone("password-reset-new", "/account/password/reset/{reset_key}", 12),
    standalone("password-reset-wrong", "/account/password/reset/1-x", 2),
    standalone("invitation", "/invitations/{invitation_token}", 6),
    standalone("account", "/account/", 22, "owner"),
    standalone("account-password", "/account/password", 4, "owner"),
    standalone("account-confirm", "/account/confirm", 10, "owner"),
    standalone("account-totp", "/account/mfa/totp/activate/", 10, "owner"),
    standalone("account-passkeys", "/account/mfa/webauthn/", 4, "owner"),
    standalone("account-passkeys-add", "/account/mfa/webauthn/add/", 12, "owner"),
    prepare=prepare,
    demo={"invitation_token": _open_invitation, "reset_key": _reset_key_of_owner},
)
