"""`millrace manage create_api_key`: an API key for a tenant's project."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from tenants import actions
from tenants.isolation.scopes import tenant_scope
from tenants.keys import snapshot
from tenants.management.arguments import tenant_of_slug
from tenants.models import Project


class Command(BaseCommand):
    help = "Create an API key and print it. It is shown only once; only its hash is stored."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("tenant", help="the tenant's slug, for example: demo")
        parser.add_argument("--project", default="default", help="the project's slug (default: default)")
        parser.add_argument("--name", default="From the command line", help="what the key is for")
        parser.add_argument(
            "--scope",
            action="append",
            choices=snapshot.SCOPES,
            help="what the key may do; may be given several times (default: inference and models)",
        )
        parser.add_argument("--model", action="append", help="a model the key may use; several times (default: all)")

    def handle(self, *args: Any, **options: Any) -> None:
        tenant = tenant_of_slug(options["tenant"])
        with tenant_scope(tenant):
            project = Project.objects.for_tenant(tenant).filter(slug=options["project"]).first()
        if project is None:
            raise CommandError(f"The tenant {tenant.slug!r} has no project {options['project']!r}.")
        scopes = options["scope"] or ("inference", "models")
        _, secret = actions.do_create_api_key(
            project, options["name"], scopes=scopes, allowed_models=options["model"] or None
        )
        self.stdout.write(secret)
