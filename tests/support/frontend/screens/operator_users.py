"""Screens of the operators' users: the list, one user, and the forms of the actions."""

from __future__ import annotations

from tests.support.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    from allauth.mfa.models import Authenticator  # here: this file is read before Django is set up

    from tenants import actions
    from tenants.models import User

    protected = User.objects.create_user("second@example.com", name="Sasha Second")
    Authenticator.objects.create(user=protected, type=Authenticator.Type.TOTP, data={"secret": "hidden"})
    actions.do_deactivate_user(User.objects.create_user("left@example.com", name="Lea Left"))
    world.rows["populated.user"] = world.owner.pk


def _owner(tenant):
    from tenants.models import Membership

    return Membership.objects.for_tenant(tenant).filter(role="owner").first().user_id


def form(name: str) -> Screen:
    return Screen(
        f"operator-users-{name}", f"/operator/users/{{user}}/{name}", 12, who="operator", states=("populated",)
    )


register(
    Screen("operator-users", "/operator/users/", queries=14, who="operator", states=("populated", "error")),
    Screen("operator-users-found", "/operator/users/?show=operators&q=otto", 14, who="operator", states=("populated",)),
    Screen(
        "operator-users-detail", "/operator/users/{user}/", queries=20, who="operator", states=("populated", "error")
    ),
    *(form(name) for name in ("deactivate", "reactivate", "grant-operator", "revoke-operator", "remove-second-factor")),
    prepare=prepare,
    demo={"user": _owner},
)
