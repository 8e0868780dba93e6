"""XML documents of other parties as trees of elements, each with its line.

A document with a DTD is refused, so that it has no entities of its own. Sizes and depths are limited.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from xml.parsers.expat import ExpatError, ParserCreate

from billing.payments.file_errors import FileRefused
from inference_worker.contract.texts import Text

MAX_ELEMENTS = 200_000
MAX_DEPTH = 40


@dataclass(slots=True)
class XmlElement:
    """An element of a document. Its name has no prefix, and its text no outer spaces."""

    name: str
    line: int
    attributes: dict[str, str] = field(default_factory=dict)
    children: list[XmlElement] = field(default_factory=list)
    namespace: str = ""
    text: str = ""

    def all(self, *path: str) -> list[XmlElement]:
        """Return all elements at a path of names below this one."""
        found = [self]
        for name in path:
            found = [child for element in found for child in element.children if child.name == name]
        return found

    def find(self, *path: str) -> XmlElement | None:
        """Return the first element at a path of names below this one."""
        return next(iter(self.all(*path)), None)

    def read(self, *path: str) -> str:
        """Return the text of the first element at a path; empty if there is none."""
        found = self.find(*path)
        return "" if found is None else found.text


class _Reader:
    """The handlers of a parser, and the elements that are open."""

    def __init__(self, encoding: str | None) -> None:
        self.parser = ParserCreate(encoding, namespace_separator=" ")
        self.parser.buffer_text = True
        self.parser.buffer_size = 2**20
        self.parser.StartDoctypeDeclHandler = self._refuse_doctype
        self.parser.StartElementHandler = self._start
        self.parser.CharacterDataHandler = self._add_text
        self.parser.EndElementHandler = self._end
        self.root: XmlElement | None = None
        self._open: list[XmlElement] = []
        self._count = 0

    def _refuse_doctype(self, *_: object) -> None:
        raise FileRefused(self.parser.CurrentLineNumber, Text("Remove the document type declaration."))

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        line = self.parser.CurrentLineNumber
        self._count += 1
        if self._count > MAX_ELEMENTS or len(self._open) >= MAX_DEPTH:
            raise FileRefused(line, Text("The file has too many elements. Divide it into several files."))
        namespace, _, local = name.rpartition(" ")
        element = XmlElement(local, line, attributes, namespace=namespace)
        if self._open:
            self._open[-1].children.append(element)
        else:
            self.root = element
        self._open.append(element)

    def _add_text(self, text: str) -> None:
        self._open[-1].text += text

    def _end(self, _name: str) -> None:
        element = self._open.pop()
        element.text = element.text.strip()


def read_xml(content: bytes, encoding: str | None = None) -> XmlElement:
    """Return the outermost element of a document.

    Args:
        encoding: that of the content, which otherwise declares it.

    Raises:
        FileRefused: it is not well-formed, has a DTD or is too large.
    """
    reader = _Reader(encoding)
    try:
        reader.parser.Parse(content, True)
    except ExpatError as exc:
        raise FileRefused(exc.lineno, Text("The file is not well-formed XML.")) from exc
    except (LookupError, ValueError) as exc:  # Python has no such encoding, or none of this kind
        raise FileRefused(1, Text("The encoding of the file is not known. Save it in UTF-8.")) from exc
    if reader.root is None:
        raise FileRefused(1, Text("The file is not well-formed XML."))
    return reader.root
