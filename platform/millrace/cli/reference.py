"""The list of all settings, generated from their declarations."""

from __future__ import annotations

import textwrap

from inference_worker.contract.env import EnvVar, variables
from millrace.environment.configuration import SETTINGS_CLASSES


def all_settings() -> list[EnvVar]:
    return sorted(variables(*SETTINGS_CLASSES), key=lambda var: var.name)


def as_text() -> str:
    """Return the settings as text for --help."""
    lines = ["settings, from the environment (or NAME_FILE: a file with the value):"]
    for var in all_settings():
        lines.append(f"  {var.name}" + ("" if var.default is None else f" (default: {var.default or 'empty'})"))
        lines += textwrap.wrap(var.help, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def as_markdown() -> str:
    """Return the settings as a Markdown table."""
    rows = ["| setting | default | description |", "|---|---|---|"]
    for var in all_settings():
        default = "none" if var.default is None else f"`{var.default}`" if var.default else "empty"
        text = var.help.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[") + (
            " (secret)" if var.secret else ""
        )
        rows.append(f"| `{var.name}` | {default} | {text} |")
    return "\n".join(rows)
