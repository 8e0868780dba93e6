"""Every setting in words, from the declarations themselves."""

from __future__ import annotations

import textwrap

from inference_worker.contract.env import EnvVar, variables
from millrace.conf.environment import SETTINGS_CLASSES

BEGIN = "<!-- settings: written by `make docs-settings` -->"
END = "<!-- end of settings -->"


def all_settings() -> list[EnvVar]:
    return sorted(variables(*SETTINGS_CLASSES), key=lambda var: var.name)


def as_text() -> str:
    """Return the settings as --help shows them."""
    lines = ["settings, from the environment (or NAME_FILE: a file that holds the value):"]
    for var in all_settings():
        lines.append(f"  {var.name}" + ("" if var.default is None else f" (default: {var.default or 'empty'})"))
        lines += textwrap.wrap(var.help, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def as_markdown() -> str:
    """Return the settings as a table, between the marks that `make docs-settings` looks for."""
    rows = ["| setting | default | what it is |", "|---|---|---|"]
    for var in all_settings():
        default = "none" if var.default is None else f"`{var.default}`" if var.default else "empty"
        text = var.help.replace("|", "\\|").replace("<", "&lt;") + (" (secret)" if var.secret else "")
        rows.append(f"| `{var.name}` | {default} | {text} |")
    return "\n".join([BEGIN, *rows, END])


def rewritten(document: str) -> str:
    """Return the document with the table between its marks made again."""
    head, _, rest = document.partition(BEGIN)
    _, _, foot = rest.partition(END)
    return head + as_markdown() + foot
