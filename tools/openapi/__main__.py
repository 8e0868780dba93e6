"""Write docs/openapi.yaml and docs/management-openapi.yaml."""

from tools.openapi import document, management

document.DOCUMENT.write_text(document.render(), encoding="utf-8")
management.DOCUMENT.write_text(management.render(), encoding="utf-8")
