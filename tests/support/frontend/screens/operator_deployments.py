"""Screens of deployments: the catalog of the settings, and one deployment without a replica and a price."""

from __future__ import annotations

from tests.support.frontend.console import Screen, World, register

NAME = "bring-your-own"
FORMS = ("edit", "load", "drain", "unload", "remove", "price")


def prepare(world: World) -> None:
    from django.conf import settings  # here: this file is read before Django is set up

    from inference_worker.contract.deployments import WantedState
    from millrace.apps.operations.deployments import do_add_deployment, do_import_settings

    do_import_settings(settings.MILLRACE.models)
    do_add_deployment(NAME, "/models/own", state=WantedState.UNLOADED, revision="v2")


register(
    Screen("operator-deployments", "/operator/deployments/", queries=40, who="operator", states=("populated", "error")),
    Screen("operator-deployments-new", "/operator/deployments/new", 10, who="operator", states=("populated",)),
    *(
        Screen(f"operator-deployments-{form}", f"/operator/deployments/{NAME}/{form}", 14, "operator", ("populated",))
        for form in FORMS
    ),
    prepare=prepare,
)
