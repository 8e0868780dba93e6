"""Screens of deployments: the catalog of the settings, and one deployment without a replica and a price."""

from __future__ import annotations

from tests.support.frontend.console import Screen, World, register

NAME = "bring-your-own"
UPSTREAM = "remote"
FORMS = {"price": 18, "edit": 14, "load": 14, "drain": 14, "unload": 14, "remove": 14, "test": 18}  # with their queries


def prepare(world: World) -> None:
    from django.conf import settings  # here: this file is read before Django is set up

    from inference_worker.contract.deployments import WantedState
    from millrace.apps.deployments.deployments import do_add_deployment, do_import_settings

    do_import_settings(settings.MILLRACE.models)
    do_add_deployment(NAME, "/models/own", state=WantedState.UNLOADED, revision="v2")
    do_add_deployment(UPSTREAM, engine="openai", preset="openai", upstream_model="gpt-x", secret="sk-of-the-screens")


register(
    Screen("operator-deployments", "/operator/deployments/", queries=40, who="operator", states=("populated", "error")),
    Screen("operator-deployments-new", "/operator/deployments/new", 10, who="operator", states=("populated",)),
    *(
        Screen(
            f"operator-deployments-new-{source}", f"/operator/deployments/new/{source}", 14, "operator", ("populated",)
        )
        for source in ("catalog", "path", "openai", "anthropic", "managed")
    ),
    Screen("operator-upstreams-edit", f"/operator/deployments/{UPSTREAM}/edit", 14, "operator", ("populated",)),
    *(
        Screen(
            f"operator-deployments-{form}", f"/operator/deployments/{NAME}/{form}", queries, "operator", ("populated",)
        )
        for form, queries in FORMS.items()
    ),
    prepare=prepare,
)
