"""Invoices as PDF/A-3b with attached Factur-X XML.

The same document gives the same bytes: the typesetter, its fonts and the PDF library are pinned, and no clock is read.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pikepdf
import structlog
import typst

from billing.invoicing import facturx
from billing.invoicing.document import in_words
from billing.invoicing.glyphs import REPLACEMENT, font_directories, printable

log = structlog.get_logger(__name__)
_PAGE = Path(__file__).with_name("page.typ")  # the start of every document
_TEMPLATE = _PAGE.with_name("invoice.typ")
_NOT_ASCII = re.compile(r"[^\n\x20-\x7e]")
_FX = "urn:factur-x:pdfa:CrossIndustryDocument:invoice:1p0#"
_PROPERTIES = {
    "DocumentFileName": "name of the embedded XML invoice file",
    "DocumentType": "INVOICE",
    "Version": "version of the Factur-X XML schema used",
    "ConformanceLevel": "conformance level of the embedded Factur-X data",
}


def render_pdf(document: Mapping[str, Any]) -> bytes:
    """Return the PDF of a final invoice."""
    profile, file_name = facturx.profile_of(document)
    xml = {"xml": facturx.xml(document).decode(), "xml_name": file_name}
    made = typeset(_TEMPLATE, in_words(document), datetime.fromisoformat(document["issued_at"]), xml)
    with pikepdf.open(io.BytesIO(made)) as file:
        metadata = file.Root.Metadata
        metadata.write(_with_factur_x(metadata.read_bytes().decode(), profile, file_name).encode())
        out = io.BytesIO()
        file.save(out, deterministic_id=True, fix_metadata_version=False)
    return out.getvalue()


def typeset(
    template: Path, words: dict[str, Any], at: datetime, inputs: Mapping[str, str] = MappingProxyType({})
) -> bytes:
    """Typeset a document, at most twice.

    PDF/A requires a glyph for every character. If the typesetter lacks one in spite of the fonts' character maps, the
    texts are printed in ASCII.

    Args:
        words: the texts of the document, with those of `page.typ`: title, number, reason and seller.
        at: the time in the metadata of the file.
        inputs: further inputs of the template.
    """
    try:
        return _compile(template, _each_text(words, printable), at, inputs)
    except typst.TypstError as exc:
        log.error("invoice_typeset_in_ascii", number=words["number"], error=str(exc))
    return _compile(template, _each_text(words, _ascii), at, inputs)


def _compile(template: Path, words: Any, at: datetime, inputs: Mapping[str, str]) -> bytes:
    return typst.compile(
        _PAGE.read_bytes() + template.read_bytes(),
        format="pdf",
        sys_inputs={"words": json.dumps(words), **inputs},
        pdf_standards="a-3b",
        font_paths=_fonts(),
        timestamp=int(at.timestamp()),
    )


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return `value` with each of its texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _each_text(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_each_text(item, change) for item in value]
    return value


def _ascii(text: str) -> str:
    return _NOT_ASCII.sub(REPLACEMENT, text)


@cache
def _fonts() -> typst.Fonts:
    """Return the fonts of the typesetter. Fonts of the machine must not change an invoice."""
    return typst.Fonts(include_system_fonts=False, font_paths=list(font_directories()))


def _with_factur_x(xmp: str, profile: str, file_name: str) -> str:
    """Declare and set the metadata properties of Factur-X, as PDF/A requires."""
    shown = dict(zip(_PROPERTIES, (file_name, "INVOICE", "1.0", profile), strict=True))
    described = "".join(
        f'<rdf:li rdf:parseType="Resource"><pdfaProperty:name>{name}</pdfaProperty:name>'
        "<pdfaProperty:valueType>Text</pdfaProperty:valueType><pdfaProperty:category>external</pdfaProperty:category>"
        f"<pdfaProperty:description>{what}</pdfaProperty:description></rdf:li>"
        for name, what in _PROPERTIES.items()
    )
    schema = (
        '<rdf:li rdf:parseType="Resource"><pdfaSchema:schema>Factur-X PDFA Extension Schema</pdfaSchema:schema>'
        f"<pdfaSchema:namespaceURI>{_FX}</pdfaSchema:namespaceURI><pdfaSchema:prefix>fx</pdfaSchema:prefix>"
        f"<pdfaSchema:property><rdf:Seq>{described}</rdf:Seq></pdfaSchema:property></rdf:li>"
    )
    values = "".join(f"<fx:{name}>{value}</fx:{name}>" for name, value in shown.items())
    schemas, end = "<pdfaExtension:schemas><rdf:Bag>", "</rdf:RDF>"
    if xmp.count(schemas) != 1 or xmp.count(end) != 1:
        raise ValueError("unexpected metadata of the typesetter: adapt _with_factur_x")
    xmp = xmp.replace(schemas, schemas + schema)
    return xmp.replace(end, f'<rdf:Description rdf:about="" xmlns:fx="{_FX}">{values}</rdf:Description>{end}')
