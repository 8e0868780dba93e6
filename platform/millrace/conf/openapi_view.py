"""`/api/schema/`: the OpenAPI document of the management API."""

from __future__ import annotations

from threading import Lock

from django.http import HttpResponse
from django.utils import translation
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.views import SpectacularAPIView
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request

_documents: dict[str, bytes] = {}  # by media type
_generation = Lock()


class ManagementSchemaView(SpectacularAPIView):
    """Return the document as YAML or JSON. It depends only on code and settings, so a process generates it once."""

    def get(self, request: Request) -> HttpResponse:
        """Return the document in the media type that the request accepts."""
        renderer, _ = self.perform_content_negotiation(request)
        media_type = renderer.media_type  # without the parameters of the request's, which have no bound
        with _generation:
            if media_type not in _documents:
                _documents[media_type] = render_schema(renderer)
        name = self._get_filename(request, None)  # type: ignore[no-untyped-call]
        disposition = f'inline; filename="{name}"'
        return HttpResponse(
            _documents[media_type], content_type=media_type, headers={"Content-Disposition": disposition}
        )


def render_schema(renderer: BaseRenderer) -> bytes:
    """Generate the document, and return it as `renderer` writes it."""
    with translation.override("en"):
        schema = SchemaGenerator().get_schema(public=True)  # type: ignore[no-untyped-call]
        content: bytes | str = renderer.render(schema, renderer.media_type, {})
    return content.encode() if isinstance(content, str) else content
