"""URLs of deployments, below /api/."""

from __future__ import annotations

from django.urls import path

from millrace.apps.deployments import api

urlpatterns = [
    path("operator/models", api.ServedModels.as_view(), name="api-operator-models"),
    path("operator/deployments", api.Deployments.as_view(), name="api-operator-deployments"),
    path("operator/deployments/check", api.DeploymentCheck.as_view(), name="api-operator-deployments-check"),
    path("operator/deployments/import", api.DeploymentImport.as_view(), name="api-operator-deployments-import"),
    path("operator/deployments/<str:name>", api.DeploymentOne.as_view(), name="api-operator-deployment"),
    *(
        path(
            f"operator/deployments/<str:name>/{action}",
            api.DeploymentAction.as_view(action_name=action),
            name=f"api-operator-deployment-{action}",
        )
        for action in api.STATES
    ),
    path("operator/deployments/<str:name>/price", api.DeploymentPrice.as_view(), name="api-operator-deployment-price"),
]
