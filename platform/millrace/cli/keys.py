"""`millrace keys`, `members` and `webhooks`: who and what may access a tenant, and where its events go."""

from __future__ import annotations

from typing import Any

import click

from inference_worker.contract.command_line import format_command
from millrace.cli.app import ResourceGroup, Session, command, given_options
from millrace.cli.output import Column, join_values, moment, yes_no

SCOPES = click.Choice(["inference", "models", "endpoints", "cache", "manage"])
ROLES = click.Choice(["owner", "admin", "developer", "billing", "readonly"])
EVENT_TYPES = click.Choice(
    [
        "alert.resolved",
        "alert.triggered",
        "budget.threshold_reached",
        "credit_note.finalized",
        "invoice.finalized",
        "invoice.paid",
        "invoice.past_due",
        "invoice.voided",
        "invoice.written_off",
        "payment.recorded",
        "webhook.test",
    ]
)

_KEY = [
    Column("id", "id", right=True),
    Column("name", "name"),
    Column("prefix", "prefix"),
    Column("project", "project_id", right=True),
    Column("scopes", "scopes", join_values),
    Column("expires", "expires_at", moment),
    Column("last used", "last_used_at", moment),
    Column("state", lambda key: "active" if key["live"] else "revoked" if key["revoked_at"] else "expired"),
]
_KEY_FIELDS = [
    *_KEY[:-1],
    Column("models", "allowed_models", join_values),
    Column("IP ranges", "allowed_ip_ranges", join_values),
    Column("created", "created_at", moment),
    Column("created by", "created_by"),
    Column("replaces", "replaces_id"),
    _KEY[-1],
]
_MEMBER = [Column("id", "id", right=True), Column("email", "email"), Column("name", "name"), Column("role", "role")]
_INVITATION = [
    Column("id", "id", right=True),
    Column("email", "email"),
    Column("role", "role"),
    Column("expires", "expires_at", moment),
    Column("open", "open", yes_no),
    Column("email", lambda row: row["delivery_error"] or row["delivery_state"]),
]
_WEBHOOK = [
    Column("id", "id", right=True),
    Column("url", "url"),
    Column("events", "event_types", lambda types: join_values(types) or "all"),
    Column("state", lambda row: "active" if row["active"] else "inactive"),
    Column("last attempt", "last_at", moment),
    Column("result", lambda row: row["last_status"] or row["last_error"]),
]
_DELIVERY = [
    Column("id", "id", right=True),
    Column("event", "event_type"),
    Column("url", "url"),
    Column("state", "state"),
    Column("attempts", "attempt_count", right=True),
    Column("created", "created_at", moment),
]


@click.group(cls=ResourceGroup)
def keys() -> None:
    """Manage API keys."""


@command(keys, "list", example="millrace keys list --live", rows=True)
@click.option("--live/--revoked", default=None, help="Only active keys, or only revoked and expired ones.")
@click.option("--project", type=int, metavar="ID", help="Only keys of this project.")
def list_keys(session: Session, limit: int, **filters: Any) -> None:
    """List API keys, newest first."""
    session.rows(session.client.keys.list(**given_options(filters)), _KEY, limit=limit, empty="No API keys.")


@command(keys, "show", example="millrace keys show 12")
@click.argument("id", type=int)
def show_key(session: Session, id: int) -> None:
    """Show an API key, without its secret."""
    session.one(session.client.keys.get(id), _KEY_FIELDS)


@command(keys, "create", example="millrace keys create ci --scope inference --model smollm2-135m")
@click.argument("name")
@click.option("--scope", "scopes", multiple=True, type=SCOPES, help="What the key may do; repeat for several.")
@click.option("--model", "allowed_models", multiple=True, metavar="MODEL", help="Only this model; repeat for several.")
@click.option("--ip-range", "allowed_ip_ranges", multiple=True, metavar="CIDR", help="Only from these addresses.")
@click.option("--project", "project_id", type=int, metavar="ID", help="Project of the key; default: `default`.")
@click.option("--expires", "expires_at", metavar="TIME", help="Expiration, such as 2027-01-31T12:00Z.")
def create_key(session: Session, **fields: Any) -> None:
    """Create an API key and print its secret, which is shown only once."""
    made = session.client.keys.create(**given_options(fields))
    if session.as_json:
        session.done(made, "")
        return
    click.echo(f"Created the key {made['id']}. Copy it now, it is not shown again:", err=True)
    click.echo(made["secret"])


@command(keys, "rename", example="millrace keys rename 12 build-server")
@click.argument("id", type=int)
@click.argument("name")
def rename_key(session: Session, id: int, name: str) -> None:
    """Rename an API key."""
    session.done(session.client.keys.update(id, name=name), f"Renamed the key {id}.")


@command(keys, "rotate", example="millrace keys rotate 12 --overlap-hours 1")
@click.argument("id", type=int)
@click.option("--overlap-hours", type=int, metavar="N", help="Hours for which the old key remains valid; default: 24.")
def rotate_key(session: Session, id: int, **fields: Any) -> None:
    """Create a key with the same rights, and let the old one expire."""
    made = session.client.keys.rotate(id, **given_options(fields))
    if session.as_json:
        session.done(made, "")
        return
    click.echo(f"Created the key {made['id']}. Copy it now, it is not shown again:", err=True)
    click.echo(made["secret"])


@command(keys, "revoke", example="millrace keys revoke 12")
@click.argument("id", type=int)
def revoke_key(session: Session, id: int) -> None:
    """Revoke an API key permanently."""
    session.client.keys.revoke(id)
    session.done({"id": id, "revoked": True}, f"Revoked the key {id}.")


@click.group(cls=ResourceGroup)
def members() -> None:
    """Manage the members of the tenant, and invite users."""


@command(members, "list", example="millrace members list --role admin", rows=True)
@click.option("--role", type=ROLES, help="Only members with this role.")
def list_members(session: Session, limit: int, **filters: Any) -> None:
    """List the members and their roles."""
    session.rows(session.client.members.list(**given_options(filters)), _MEMBER, limit=limit)


@command(members, "role", example="millrace members role 4 developer")
@click.argument("id", type=int)
@click.argument("role", type=ROLES)
def change_role(session: Session, id: int, role: Any) -> None:
    """Change the role of a member."""
    member = session.client.members.update(id, role=role)
    session.done(member, f"{member['email']} is {member['role']} now.")


@command(members, "remove", example="millrace members remove 4")
@click.argument("id", type=int)
def remove_member(session: Session, id: int) -> None:
    """Remove a member. Keys that the member created remain."""
    session.client.members.delete(id)
    session.done({"id": id, "removed": True}, f"Removed the member {id}.")


@command(members, "invitations", example="millrace members invitations", rows=True)
def list_invitations(session: Session, limit: int) -> None:
    """List the invitations, newest first."""
    session.rows(session.client.invitations.list(), _INVITATION, limit=limit, empty="No invitations.")


@command(members, "invite", example="millrace members invite dev@example.com --role developer")
@click.argument("email")
@click.option("--role", type=ROLES, default="developer", show_default=True, help="Role of the new member.")
def invite(session: Session, email: str, role: Any) -> None:
    """Invite a user by email."""
    invitation = session.client.invitations.create(email=email, role=role)
    session.done(invitation, f"Invited {email} as {role}; the link expires {moment(invitation['expires_at'])} UTC.")


@command(members, "revoke-invitation", example="millrace members revoke-invitation 9")
@click.argument("id", type=int)
def revoke_invitation(session: Session, id: int) -> None:
    """Revoke an invitation."""
    session.client.invitations.revoke(id)
    session.done({"id": id, "revoked": True}, f"Revoked the invitation {id}.")


@click.group(cls=ResourceGroup)
def webhooks() -> None:
    """Manage webhook endpoints and their deliveries."""


@command(webhooks, "list", example="millrace webhooks list", rows=True)
def list_webhooks(session: Session, limit: int) -> None:
    """List the webhook endpoints with their newest attempts."""
    session.rows(session.client.webhooks.list(), _WEBHOOK, limit=limit, empty="No webhook endpoints.")


@command(webhooks, "create", example="millrace webhooks create https://example.com/hooks --event invoice.paid")
@click.argument("url")
@click.option("--event", "event_types", multiple=True, type=EVENT_TYPES, help="Event type; repeat; default: all.")
@click.option("--description", help="What the endpoint is for.")
def create_webhook(session: Session, **fields: Any) -> None:
    """Create a webhook endpoint and print its signing secret, which is shown only once."""
    made = session.client.webhooks.create(**given_options(fields))
    if session.as_json:
        session.done(made, "")
        return
    click.echo(f"Created the endpoint {made['id']}. Copy its signing secret now, it is not shown again:", err=True)
    click.echo(made["secret"])


def _webhook_switch(name: str, active: bool, text: str, done: str) -> None:
    @command(webhooks, name, example=f"millrace webhooks {name} 2")
    @click.argument("id", type=int)
    def run(session: Session, id: int) -> None:
        session.done(session.client.webhooks.update(id, active=active), f"{done} the endpoint {id}.")

    webhooks.commands[name].help = text


_webhook_switch("enable", True, "Enable an endpoint that was disabled.", "Enabled")
_webhook_switch("disable", False, "Disable an endpoint. Waiting deliveries are marked as failed.", "Disabled")


@command(webhooks, "rotate", example="millrace webhooks rotate 2")
@click.argument("id", type=int)
def rotate_webhook(session: Session, id: int) -> None:
    """Replace the signing secret. The old one is valid for a day."""
    made = session.client.webhooks.rotate(id)
    session.done(made, made["secret"])


@command(webhooks, "test", example="millrace webhooks test 2")
@click.argument("id", type=int)
def test_webhook(session: Session, id: int) -> None:
    """Send a test event to an endpoint."""
    delivery = session.client.webhooks.test(id)
    deliveries = format_command("webhooks deliveries")
    session.done(delivery, f"Queued the delivery {delivery['id']}: see `{deliveries}`.")


@command(webhooks, "delete", example="millrace webhooks delete 2")
@click.argument("id", type=int)
def delete_webhook(session: Session, id: int) -> None:
    """Delete an endpoint with its deliveries."""
    session.client.webhooks.delete(id)
    session.done({"id": id, "deleted": True}, f"Deleted the endpoint {id}.")


@command(webhooks, "deliveries", example="millrace webhooks deliveries --state failed", rows=True)
@click.option("--endpoint", type=int, metavar="ID", help="Only deliveries to this endpoint.")
@click.option("--state", type=click.Choice(["pending", "delivered", "failed"]), help="Only deliveries in this state.")
def list_deliveries(session: Session, limit: int, **filters: Any) -> None:
    """List the deliveries, newest first."""
    session.rows(session.client.webhook_deliveries.list(**given_options(filters)), _DELIVERY, limit=limit)


@command(webhooks, "replay", example="millrace webhooks replay 31")
@click.argument("id", type=int)
def replay(session: Session, id: int) -> None:
    """Send the event of a delivery again."""
    session.done(session.client.webhook_deliveries.replay(id), f"Queued the delivery {id} again.")
