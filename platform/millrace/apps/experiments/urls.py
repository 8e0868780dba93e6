"""URLs of experiments, below /api/."""

from __future__ import annotations

from django.urls import path

from millrace.apps.experiments import api

urlpatterns = [
    path("experiments", api.Experiments.as_view(), name="api-experiments"),
    path("experiments/<int:pk>", api.ExperimentDetail.as_view(), name="api-experiment"),
    path("experiments/<int:pk>/results", api.ExperimentResultsView.as_view(), name="api-experiment-results"),
    path("experiments/<int:pk>/start", api.ExperimentStart.as_view(), name="api-experiment-start"),
    path("experiments/<int:pk>/stop", api.ExperimentStop.as_view(), name="api-experiment-stop"),
]
