"""Invoices as PDF/A-3b with attached Factur-X XML.

The same document gives the same bytes: the typesetter, its fonts and the PDF library are pinned, and no clock is read.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Collection, Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pikepdf
import typst

from billing.invoicing import facturx
from billing.invoicing.document import in_words

_TEMPLATE = Path(__file__).with_name("invoice.typ")
_UNSHOWN = re.compile(r"the text `\"(.+?)\"` could not be displayed", re.DOTALL)
_CHARACTER = re.compile(r"\\u\{([0-9a-f]+)\}|\\(.)|.", re.DOTALL)
_FX = "urn:factur-x:pdfa:CrossIndustryDocument:invoice:1p0#"
_PROPERTIES = {
    "DocumentFileName": ("factur-x.xml", "name of the embedded XML invoice file"),
    "DocumentType": ("INVOICE", "INVOICE"),
    "Version": ("1.0", "version of the Factur-X XML schema used"),
    "ConformanceLevel": (facturx.PROFILE, "conformance level of the embedded Factur-X data"),
}


def rendered(document: Mapping[str, Any]) -> bytes:
    """Return the PDF of a final invoice."""
    made = _typeset(in_words(document), facturx.xml(document).decode(), document["issued_at"])
    with pikepdf.open(io.BytesIO(made)) as file:
        metadata = file.Root.Metadata
        metadata.write(_with_factur_x(metadata.read_bytes().decode()).encode())
        out = io.BytesIO()
        file.save(out, deterministic_id=True, fix_metadata_version=False)
    return out.getvalue()


def _typeset(words: dict[str, Any], xml: str, issued_at: str) -> bytes:
    """Typeset the document. PDF/A requires a glyph for every character, so missing ones become question marks."""
    moment = int(datetime.fromisoformat(issued_at).timestamp())
    missing: set[str] = set()
    while True:
        try:
            return typst.compile(
                _TEMPLATE.read_bytes(),
                format="pdf",
                sys_inputs={"words": json.dumps(_without(words, missing)), "xml": xml},
                pdf_standards="a-3b",
                font_paths=_fonts(),
                timestamp=moment,
            )
        except typst.TypstError as exc:
            unshown = _UNSHOWN.search(str(exc))
            found = set() if unshown is None else _unescaped(unshown[1]) - missing
            if not found:
                raise
            missing |= found


def _unescaped(text: str) -> set[str]:
    """Return the characters of a text as printed in the typesetter's errors, where some are escaped by number."""
    return {chr(int(match[1], 16)) if match[1] else match[2] or match[0] for match in _CHARACTER.finditer(text)}


def _without(value: Any, characters: Collection[str]) -> Any:
    """Return the texts of `value` with a question mark for each of the characters."""
    if isinstance(value, str):
        return value.translate(dict.fromkeys(map(ord, characters), "?"))
    if isinstance(value, dict):
        return {key: _without(item, characters) for key, item in value.items()}
    if isinstance(value, list):
        return [_without(item, characters) for item in value]
    return value


@cache
def _fonts() -> typst.Fonts:
    """Return the fonts of the typesetter. Fonts of the machine must not change an invoice."""
    return typst.Fonts(include_system_fonts=False)


def _with_factur_x(xmp: str) -> str:
    """Declare and set the metadata properties of Factur-X, as PDF/A requires."""
    described = "".join(
        f'<rdf:li rdf:parseType="Resource"><pdfaProperty:name>{name}</pdfaProperty:name>'
        "<pdfaProperty:valueType>Text</pdfaProperty:valueType><pdfaProperty:category>external</pdfaProperty:category>"
        f"<pdfaProperty:description>{what}</pdfaProperty:description></rdf:li>"
        for name, (_, what) in _PROPERTIES.items()
    )
    schema = (
        '<rdf:li rdf:parseType="Resource"><pdfaSchema:schema>Factur-X PDFA Extension Schema</pdfaSchema:schema>'
        f"<pdfaSchema:namespaceURI>{_FX}</pdfaSchema:namespaceURI><pdfaSchema:prefix>fx</pdfaSchema:prefix>"
        f"<pdfaSchema:property><rdf:Seq>{described}</rdf:Seq></pdfaSchema:property></rdf:li>"
    )
    values = "".join(f"<fx:{name}>{value}</fx:{name}>" for name, (value, _) in _PROPERTIES.items())
    schemas, end = "<pdfaExtension:schemas><rdf:Bag>", "</rdf:RDF>"
    if xmp.count(schemas) != 1 or xmp.count(end) != 1:
        raise ValueError("unexpected metadata of the typesetter: adapt _with_factur_x")
    xmp = xmp.replace(schemas, schemas + schema)
    return xmp.replace(end, f'<rdf:Description rdf:about="" xmlns:fx="{_FX}">{values}</rdf:Description>{end}')
