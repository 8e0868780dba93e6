"""The YAML format of the OpenAPI documents in docs."""

from __future__ import annotations

from typing import Any

import yaml


def as_yaml(document: dict[str, Any], head: str) -> str:
    """Return a document as YAML below a comment."""
    return head + yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def read_yaml(text: str) -> dict[str, Any]:
    """Return a document. libyaml, where PyYAML has it, is ten times as fast."""
    return dict(yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))  # noqa: S506 - both are safe


class _Dumper(yaml.SafeDumper):
    """A dumper that writes short collections on one line, lists of plain values without dashes, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        return super().represent_mapping(tag, mapping, _is_short(mapping))

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        is_flat = all(isinstance(item, str | int | None) for item in sequence)
        return super().represent_sequence(tag, sequence, is_flat or _is_short(sequence))


def _is_short(value: Any) -> bool:
    return len(repr(value)) <= 96
