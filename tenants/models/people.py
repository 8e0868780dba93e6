"""Users, memberships and invitations."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, ClassVar

from allauth.account.models import EmailAddress
from django.contrib.auth.base_user import AbstractBaseUser, BaseUserManager
from django.contrib.auth.models import PermissionsMixin
from django.db import models, transaction
from django.db.models.functions import Lower
from django.utils.crypto import salted_hmac

from tenants.isolation.scopes import TenantManager
from tenants.models.tenancy import Tenant


class UserManager(BaseUserManager["User"]):
    """The manager of users. Email addresses are stored in lower case."""

    def create_user(self, email: str, password: str | None = None, **fields: Any) -> User:
        user = self.model(email=self.normalize_email(email).lower(), **fields)
        user.set_password(password)
        user.save(using=self._db)
        return user

    def create_superuser(self, email: str, password: str | None = None, **fields: Any) -> User:
        """Create an operator with every permission in every tenant and in Django's admin."""
        return self.create_user(email, password, is_staff=True, is_superuser=True, **fields)

    def get_by_natural_key(self, username: str | None) -> User:
        return self.get(email=(username or "").lower())


class User(AbstractBaseUser, PermissionsMixin):
    """A person with an email address. `is_staff` marks operators; a `Membership` adds a user to a tenant."""

    AUDITED: ClassVar = ("email", "name", "is_active", "is_staff", "is_superuser")

    email = models.EmailField(unique=True)
    name = models.CharField(max_length=200, blank=True)
    is_active = models.BooleanField(default=True)
    is_staff = models.BooleanField("operator", default=False)
    date_joined = models.DateTimeField(auto_now_add=True)
    # Increased to end all sessions, playground tokens and known devices of the user.
    session_generation = models.PositiveIntegerField(default=0, db_default=0)
    # Set by the trigger `tenants_user_operator_until`, whatever changes the user.
    operator_until = models.DateTimeField(
        null=True, editable=False, help_text="when the user was last deactivated as an operator, or lost the right"
    )

    objects: ClassVar[UserManager] = UserManager()

    EMAIL_FIELD = "email"
    USERNAME_FIELD = "email"

    def __str__(self) -> str:
        return self.email

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save the user. The only place that stores the address as verified, for users of every origin.

        A user joins by a link that was emailed to the address, or an operator vouches for it.
        """
        changed = kwargs.get("update_fields")
        with transaction.atomic():
            super().save(*args, **kwargs)
            if changed is None or "email" in changed:
                self._verify_address()

    def _verify_address(self) -> None:
        """Make the email address the only one of the user. No other user can have it.

        allauth would add it as unverified at the first password reset. Without a verified address, it accepts no second
        factor, and the first sign-in through a provider deletes the password.
        """
        address = self.email.lower()
        others = EmailAddress.objects.filter(models.Q(user_id=self.pk) | models.Q(email=address))
        others.exclude(user_id=self.pk, email=address).delete()
        EmailAddress.objects.bulk_create(
            [EmailAddress(user_id=self.pk, email=address, verified=True, primary=True)],
            update_conflicts=True,
            unique_fields=["user", "email"],
            update_fields=["verified", "primary"],
        )

    def get_session_auth_hash(self) -> str:
        """Return the hash that sessions must contain. It changes with the password and the session generation."""
        return self._with_generation(super().get_session_auth_hash())

    def get_session_auth_fallback_hash(self) -> Iterator[str]:
        """Yield the hash under each older secret key."""
        for password_hash in super().get_session_auth_fallback_hash():
            yield self._with_generation(password_hash)

    def _with_generation(self, password_hash: str) -> str:
        if not self.session_generation:
            return password_hash
        return salted_hmac("tenants.user", f"{password_hash}:{self.session_generation}", algorithm="sha256").hexdigest()


class Membership(models.Model):
    """The role of a user in a tenant."""

    AUDITED: ClassVar = ("user_id", "role", "alert_emails")

    class Role(models.TextChoices):
        OWNER = "owner"
        ADMIN = "admin"
        DEVELOPER = "developer"
        BILLING = "billing"
        READ_ONLY = "readonly"

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=20, choices=Role)
    # Of the roles that receive alerts: whether this member does.
    alert_emails = models.BooleanField(default=True, db_default=True)
    created_at = models.DateTimeField(auto_now_add=True)

    objects = TenantManager()

    class Meta:
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["tenant", "user"], name="membership_unique"),
            models.CheckConstraint(
                condition=models.Q(role__in=["owner", "admin", "developer", "billing", "readonly"]),
                name="membership_role_known",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.user} in {self.tenant}: {self.role}"


class Invitation(models.Model):
    """An invitation to a tenant, sent to `email`.

    Its token is derived from the row and a secret of the platform (`tenants.invitations`), so the row is not enough to
    accept the invitation.
    """

    AUDITED: ClassVar = ("email", "role", "expires_at", "accepted_at", "revoked_at")

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    email = models.EmailField()
    role = models.CharField(max_length=20, choices=Membership.Role)
    nonce = models.CharField(max_length=32)
    invited_by = models.ForeignKey(User, on_delete=models.SET_NULL, null=True, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    accepted_at = models.DateTimeField(null=True)
    accepted_by = models.ForeignKey(User, on_delete=models.SET_NULL, null=True, related_name="+")
    revoked_at = models.DateTimeField(null=True)

    objects = TenantManager()

    class Meta:
        ordering: ClassVar[list[str]] = ["-id"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(
                "tenant",
                Lower("email"),
                condition=models.Q(accepted_at__isnull=True, revoked_at__isnull=True),
                name="invitation_one_open",
            ),
            models.CheckConstraint(condition=models.Q(role__in=Membership.Role.values), name="invitation_role_known"),
        ]

    def __str__(self) -> str:
        return f"{self.email}: {self.role}"

    @property
    def is_open(self) -> bool:
        return self.accepted_at is None and self.revoked_at is None and self.expires_at > datetime.now(UTC)
