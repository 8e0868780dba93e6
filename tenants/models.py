"""Who is who: tenants with their projects, keys and members, and the people that log in."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar

from django.contrib.auth.base_user import AbstractBaseUser, BaseUserManager
from django.contrib.auth.models import PermissionsMixin
from django.contrib.postgres.fields import ArrayField
from django.db import models

from tenants import snapshot
from tenants.scoping import TenantManager


class UserManager(BaseUserManager["User"]):
    def create_user(self, email: str, password: str | None = None, **fields: Any) -> User:
        user = self.model(email=self.normalize_email(email).lower(), **fields)
        user.set_password(password)
        user.save(using=self._db)
        return user

    def create_superuser(self, email: str, password: str | None = None, **fields: Any) -> User:
        """An operator: sees every tenant, and the break-glass admin."""
        return self.create_user(email, password, is_staff=True, is_superuser=True, **fields)

    def get_by_natural_key(self, username: str | None) -> User:
        return self.get(email=(username or "").lower())


class User(AbstractBaseUser, PermissionsMixin):
    """A person, known by an e-mail address. `is_staff` makes an operator; tenants are joined by `Membership`."""

    email = models.EmailField(unique=True)
    name = models.CharField(max_length=200, blank=True)
    is_active = models.BooleanField(default=True)
    is_staff = models.BooleanField("operator", default=False)
    date_joined = models.DateTimeField(auto_now_add=True)

    objects: ClassVar[UserManager] = UserManager()

    EMAIL_FIELD = "email"
    USERNAME_FIELD = "email"

    def __str__(self) -> str:
        return self.email


class Tenant(models.Model):
    """A customer: the unit of isolation, of limits and of the invoice."""

    class Status(models.TextChoices):
        ACTIVE = "active"
        SUSPENDED = "suspended"

    slug = models.SlugField(max_length=50, unique=True)
    name = models.CharField(max_length=200)
    status = models.CharField(max_length=20, choices=Status, default=Status.ACTIVE)
    is_demo = models.BooleanField(default=False)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering: ClassVar[list[str]] = ["slug"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.CheckConstraint(condition=models.Q(status__in=["active", "suspended"]), name="tenant_status_known")
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def is_suspended(self) -> bool:
        return self.status == self.Status.SUSPENDED


class Project(models.Model):
    """A part of a tenant's work, with keys of its own."""

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    slug = models.SlugField(max_length=50)
    name = models.CharField(max_length=200)
    created_at = models.DateTimeField(auto_now_add=True)

    objects = TenantManager()

    class Meta:
        ordering: ClassVar[list[str]] = ["slug"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["tenant", "slug"], name="project_slug_once_a_tenant")
        ]

    def __str__(self) -> str:
        return self.name


class Membership(models.Model):
    """What a person may do in a tenant."""

    class Role(models.TextChoices):
        OWNER = "owner"
        ADMIN = "admin"
        DEVELOPER = "developer"
        BILLING = "billing"
        READ_ONLY = "readonly"

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=20, choices=Role)
    created_at = models.DateTimeField(auto_now_add=True)

    objects = TenantManager()

    class Meta:
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["tenant", "user"], name="member_once_a_tenant"),
            models.CheckConstraint(
                condition=models.Q(role__in=["owner", "admin", "developer", "billing", "readonly"]),
                name="membership_role_known",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.user} in {self.tenant}: {self.role}"


class ApiKey(models.Model):
    """A key for the API. The secret is shown once and never stored: `key_hash` finds it, `prefix` tells it apart."""

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    project = models.ForeignKey(Project, on_delete=models.PROTECT, related_name="keys")
    name = models.CharField(max_length=200)
    prefix = models.CharField(max_length=20)
    key_hash = models.BinaryField(max_length=32, unique=True)
    scopes = ArrayField(models.CharField(max_length=20))
    allowed_models = ArrayField(models.CharField(max_length=64), null=True, blank=True)  # None: all
    created_at = models.DateTimeField(auto_now_add=True)
    created_by = models.ForeignKey(User, on_delete=models.SET_NULL, null=True, blank=True)
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    objects = TenantManager()

    class Meta:
        ordering: ClassVar[list[str]] = ["-id"]

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}…)"

    @property
    def is_live(self) -> bool:
        expired = self.expires_at is not None and self.expires_at <= datetime.now(UTC)
        return self.revoked_at is None and not expired


class KeySnapshot(models.Model):
    """A key compiled for the data plane (`tenants.snapshot`), found by the key's hash. Written by actions only."""

    key_hash = models.BinaryField(max_length=32, primary_key=True)
    key = models.OneToOneField(ApiKey, on_delete=models.CASCADE, related_name="compiled")
    version = models.BigIntegerField()
    payload = models.BinaryField()

    def __str__(self) -> str:
        return f"snapshot of key {self.key_id}, version {self.version}"

    def decoded(self) -> snapshot.KeySnapshot:
        return snapshot.decode(bytes(self.payload))
