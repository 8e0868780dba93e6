"""Write docs/openapi.yaml."""

from tools.openapi.document import DOCUMENT, render

DOCUMENT.write_text(render(), encoding="utf-8")
