"""URLs of caches, below /api/. They come before those of the request log, whose last one is requests/NAME."""

from __future__ import annotations

from django.urls import path

from millrace.apps.answer_caches import api, warming_api

urlpatterns = [
    path("cache-warming", warming_api.CacheWarming.as_view(), name="api-cache-warming"),
    path("cache-warming/candidates", warming_api.CacheWarmingCandidates.as_view(), name="api-cache-warming-candidates"),
    path("cache-warming/run", warming_api.CacheWarmingRun.as_view(), name="api-cache-warming-run"),
    path("requests/cache-layers", api.RequestCacheLayers.as_view(), name="api-requests-cache-layers"),
    path("requests/prompt-advice", api.RequestPromptAdvice.as_view(), name="api-requests-prompt-advice"),
]
