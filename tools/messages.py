"""The translations of the console: extracts the texts of templates, modules and scripts, and compiles the catalogs.

`python -m tools.messages` adds new texts to frontend/locale/*/LC_MESSAGES/django.po with empty translations, and
removes those that are no longer used. With `--check` it changes nothing and fails if something is missing.
`tools.build_files` compiles the catalogs to django.mo, and writes the translations of scripts to
frontend/static/frontend/texts.*.js. It needs no gettext on the machine.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FRONTEND = ROOT / "frontend"
SCRIPTS = FRONTEND / "static" / "frontend"
# Packages below the console whose texts it shows: those of `Text`, and labels of Django's forms and validators.
PACKAGES = tuple(
    ROOT / name
    for name in (
        *("inference_worker/contract", "tenants", "billing"),
        *("platform/millrace/environment", "platform/millrace/apps"),
    )
)
_NAMES = {"_": False, "_lazy": False, "Text": True, "ngettext": True}  # functions, and whether they may have a plural
# Where the texts are that users see: positions or names of the arguments of calls in `PACKAGES`.
_SHOWN_ARGUMENTS: dict[str, tuple[int | str, ...]] = {
    **dict.fromkeys(("ActionRefused", "Conflict", "NoTaxRule", "PatternError", "TargetRefused", "TooManyJobs"), (0,)),
    **{"FieldRefused": (2,), "RefusedOption": (1,), "error_at": (1,), "insert": (1,)},
    **{"EventType": (1,), "SettingGroup": (1,), "TenantSetting": ("label", "hint", "audit_label")},
    **{"HealthIssue": ("title", "todo"), "do_disable_endpoint": ("because",)},
}
_STRING = r"(u?'(?:[^'\\]|\\.)*'|u?\"(?:[^\"\\]|\\.)*\")"
_TEMPLATE = re.compile(rf"\b(?:_|gettext)\(\s*{_STRING}\s*\)|\bngettext\(\s*{_STRING}\s*,\s*{_STRING}\s*,")
_SCRIPT_TEXT = re.compile(r'\b_\(("(?:[^"\\]|\\.)*")')
# Comments, template strings and other strings of a script. An expression with a template string ends one.
_SCRIPT_PART = re.compile(
    r"//[^\n]*|/\*.*?\*/|(?P<marked>\b_\()?(?P<string>`(?:[^`\\]|\\.)*`|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*')",
    re.DOTALL,
)
# A capitalized word at the start of a text or an attribute, or a word that only sentences have. Not comments in code.
_SCRIPT_VISIBLE = re.compile(
    r"^(?:.*(?:aria-label|title|placeholder)=\")?[A-Z][a-z]+(?:[ …:.!?]|$)|^no |^[^#/<]* (?:of|the|to|is|was|them) "
)
_SCRIPT_WORDS = {"Enter", "Escape", "None", "True", "False", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun", "Hello!"}
_ENTRY = re.compile(r'^(msgid|msgid_plural|msgstr(?:\[\d\])?) (".*")$')
_REGION = re.compile(r"{%\s*(blocktranslate|comment)\b.*?{%\s*end\1\s*%}|{%.*?%}|{#.*?#}", re.DOTALL)
_VARIABLE, _TAG = re.compile(r"{{.*?}}"), re.compile(r"<(/?)(\w*)[^>]*>")
_ATTRIBUTE = re.compile(r'\b(?:aria-label|title|placeholder|data-label|alt)="([^"]*)"')
_MARKED_ARGUMENT = re.compile(r'_\("[^"]*"\)')
_TABLE, _STAT = re.compile(r"{%\s*table\b(.*?)%}"), re.compile(r'{%\s*stat\s+"([^"]*)"')
_SHOWN_KEYWORDS = ("label", "help_text", "submit", "effect", "message")
_SAME_EVERYWHERE = {"Millrace", "MR", "JSON", "CSV", "DATEV", "IBAN", "BIC", "UTC", "webhook-id", "request-detail"}
HEADER = "Content-Type: text/plain; charset=UTF-8\nLanguage: {}\nPlural-Forms: nplurals=2; plural=(n != 1);\n"
Message = tuple[str, str]  # the text and its plural, which may be empty
Catalog = dict[Message, tuple[str, ...]]


def extract(*directories: Path) -> list[Message]:
    """Return the texts of all templates and modules, in the order of their names, each once."""
    found: dict[Message, None] = {}
    for directory in directories:
        for path in sorted(directory.rglob("*.html")):
            found |= dict.fromkeys(_of_template(path.read_text(encoding="utf-8")))
        for path in sorted(directory.rglob("*.py")):
            found |= dict.fromkeys(_of_module(path.read_text(encoding="utf-8")))
    return list(found)


def scripts() -> list[Path]:
    """Return the console's scripts, without those that this module writes."""
    return sorted(path for path in SCRIPTS.glob("*.js") if not path.name.startswith("texts."))


def script_texts() -> list[str]:
    """Return the texts that scripts write: the first arguments of `_("…")`, each once."""
    found: dict[str, None] = {}
    for path in scripts():
        texts = _SCRIPT_TEXT.findall(path.read_text(encoding="utf-8"))
        found |= dict.fromkeys(json.loads(text) for text in texts)
    return list(found)


def all_texts() -> list[Message]:
    """Return all texts of the console, each once: of templates, modules, scripts and other packages."""
    scripted = [(text, "") for text in script_texts()]
    return list(dict.fromkeys([*extract(FRONTEND), *scripted, *extract(*PACKAGES)]))


def _of_template(source: str) -> Iterator[Message]:
    from django.utils.translation.template import templatize

    for match in _TEMPLATE.finditer(templatize(source)):
        texts = [ast.literal_eval(group) for group in match.groups() if group is not None]
        yield (texts[0], texts[1] if len(texts) > 1 else "")


def _of_module(source: str) -> Iterator[Message]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _NAMES:
            texts = [part.value for part in node.args[:2] if isinstance(part, ast.Constant)]
            if texts and _has_words(str(texts[0])):
                yield (str(texts[0]), str(texts[1]) if _NAMES[node.func.id] and len(texts) > 1 else "")


def _has_words(text: str) -> bool:
    return re.search(r"[A-Za-z]{2}", re.sub(r"%\(\w+\)s", "", text)) is not None


def unmarked_in_template(source: str) -> list[str]:
    """Return the visible texts of a template that are not translated: text, labels, and arguments of tags."""
    # A tag of the template ends a text. A star replaces it, so that attributes of HTML tags can contain it.
    bare = _VARIABLE.sub(" ", _REGION.sub("*", source))
    found, at, code = [], 0, False
    for tag in [*_TAG.finditer(bare), None]:
        if not code:
            found += bare[at : tag.start() if tag else len(bare)].split("*")
        if tag is not None:
            found += [text for value in _ATTRIBUTE.findall(tag.group()) for text in value.split("*")]
            if tag.group(2) in ("code", "script", "style", "kbd"):
                code = not tag.group(1)
            at = tag.end()
    for arguments in _TABLE.findall(source):
        found += re.findall(r'"([^"]*)"', _MARKED_ARGUMENT.sub("", arguments.partition(" kind=")[0]))
    found += _STAT.findall(source)
    texts = (re.sub(r"&\w+;", " ", text).strip(" ·\n") for text in found)
    return [text for text in texts if re.search(r"[A-Za-z]{2}", text) and text not in _SAME_EVERYWHERE]


def unmarked_in_script(source: str) -> list[str]:
    """Return the texts of a script that are not translated. Texts in examples of code are no texts of the console."""
    found = []
    for part in _SCRIPT_PART.finditer(source):
        text = (part["string"] or "")[1:-1]
        visible = re.sub(r"\$\{.*?\}", "*", text)
        if not part["marked"] and _SCRIPT_VISIBLE.search(visible) and text not in _SCRIPT_WORDS:
            found.append(text)
    return found


def unmarked_in_module(source: str) -> list[str]:
    """Return the texts of forms and messages in a module that are not translated."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg in _SHOWN_KEYWORDS:
            value = node.value.body if isinstance(node.value, ast.Lambda) else node.value
            parts = value.values if isinstance(value, ast.JoinedStr) else [value]
            texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            found += [text for text in texts if re.search(r"[A-Za-z]{2,} |^[A-Z][a-z]", text)]
        found += [text for text in _bare_texts(node) if re.search(r"^(?:[A-Z][a-z]+|\d+) [a-z]{2}", text)]
    return found


def unmarked_in_package(source: str, errors: tuple[str, ...] = ()) -> list[str]:
    """Return the texts of errors, issues and settings in a module of `PACKAGES` that are no `Text`.

    Args:
        errors: further exceptions whose messages are shown.
    """
    shown = _SHOWN_ARGUMENTS | dict.fromkeys(errors, (0,))
    found = []
    module = ast.parse(source)
    for scope in [module, *(node for node in ast.walk(module) if isinstance(node, ast.FunctionDef))]:
        assigned: dict[str, list[ast.expr]] = {}
        for node in ast.walk(scope):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                assigned.setdefault(node.targets[0].id, []).append(node.value)
        for node in ast.walk(scope):
            if isinstance(node, ast.Call):
                name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                for value in _chosen_arguments(node, shown.get(name, ())):
                    named = assigned.get(value.id, []) if isinstance(value, ast.Name) and scope is not module else []
                    found += [text for each in [value, *named] for text in _bare_parts(each)]
    return [text for text in dict.fromkeys(found) if _has_words(text)]


def _chosen_arguments(call: ast.Call, places: tuple[int | str, ...]) -> Iterator[ast.expr]:
    for place in places:
        if isinstance(place, int):
            yield from call.args[place : place + 1]
        else:
            yield from (keyword.value for keyword in call.keywords if keyword.arg == place)


def _bare_parts(value: ast.expr) -> Iterator[str]:
    if isinstance(value, ast.IfExp):
        yield from (text for branch in (value.body, value.orelse) for text in _bare_parts(branch))
    parts = value.values if isinstance(value, ast.JoinedStr | ast.BoolOp) else [value]
    yield from (part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))


def _bare_texts(node: ast.AST) -> Iterator[str]:
    """Yield the texts of a tuple, and the unnamed arguments of a call that does not translate them."""
    if isinstance(node, ast.Tuple):
        values = node.elts
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") not in _NAMES:
        values = node.args
    else:
        return
    for value in values:
        parts = value.values[:1] if isinstance(value, ast.JoinedStr) else [value]
        yield from (part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))


def read(path: Path) -> Catalog:
    """Return the translations of a catalog in its order."""
    found: Catalog = {}
    entry: dict[str, str] = {}
    field = ""
    for line in [*path.read_text(encoding="utf-8").splitlines(), ""]:
        match = _ENTRY.match(line)
        if match:
            field = match.group(1)
            entry[field] = json.loads(match.group(2))
        elif line.startswith('"'):
            entry[field] += json.loads(line)
        elif not line and entry:
            texts = tuple(entry[name] for name in sorted(entry) if name.startswith("msgstr"))
            if entry["msgid"]:
                found[entry["msgid"], entry.get("msgid_plural", "")] = texts
            entry = {}
    return found


def write(path: Path, language: str, catalog: Catalog) -> None:
    """Write a catalog as a PO file."""
    parts = [f'msgid ""\nmsgstr {_quote(HEADER.format(language))}\n']
    for (text, plural), translated in catalog.items():
        lines = [f"msgid {_quote(text)}"]
        if plural:
            lines.append(f"msgid_plural {_quote(plural)}")
            lines += [f"msgstr[{number}] {_quote(one)}" for number, one in enumerate(translated)]
        else:
            lines.append(f"msgstr {_quote(translated[0])}")
        parts.append("\n".join(lines) + "\n")
    path.write_text("\n".join(parts), encoding="utf-8")


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def script_file(language: str, catalog: Catalog) -> str:
    """Return the script with the translations of the scripts' texts."""
    rows = {text: catalog[text, ""][0] for text in script_texts() if all(catalog.get((text, ""), ("",)))}
    return f"window.TEXTS = {json.dumps(rows, ensure_ascii=False, indent=0)};\n"


def merge(texts: list[Message], known: Catalog) -> Catalog:
    """Return a catalog with exactly these texts, and the translations that are known."""
    return {text: known.get(text, ("", "") if text[1] else ("",)) for text in texts}


def compile_catalog(language: str, catalog: Catalog) -> bytes:
    """Return a catalog as an MO file. Texts without a translation are left out, so that English is shown."""
    rows = [("", HEADER.format(language))]
    for (text, plural), translated in catalog.items():
        if all(translated):
            rows.append((f"{text}\0{plural}" if plural else text, "\0".join(translated)))
    encoded = sorted((key.encode(), value.encode()) for key, value in rows)
    start = 28 + 16 * len(encoded)
    data, places = b"", list[int]()  # the length and the offset of each text, then of each translation
    for column in (0, 1):
        for row in encoded:
            places += [len(row[column]), start + len(data)]
            data += row[column] + b"\0"
    head = struct.pack("<7I", 0x950412DE, 0, len(encoded), 28, 28 + 8 * len(encoded), 0, start)
    return head + struct.pack(f"<{len(places)}I", *places) + data


def problems(texts: list[Message], catalog: Catalog) -> list[str]:
    """Return what is wrong with the translations of a catalog."""
    found = [f"not extracted: {text[0]!r}" for text in texts if text not in catalog]
    found += [f"no longer used: {text[0]!r}" for text in catalog if text not in set(texts)]
    for text, translated in catalog.items():
        if not all(translated):
            found.append(f"not translated: {text[0]!r}")
        for one in filter(None, translated):
            if _marks(one) != _marks(text[1] or text[0]) and _marks(one) != _marks(text[0]):
                found.append(f"other placeholders or tags: {text[0]!r}")
    return found


def _marks(text: str) -> list[str]:
    return sorted(re.findall(r"%\(\w+\)s|</?\w+[^>]*>|%%", text))


def catalogs() -> dict[str, Path]:
    """Return the catalog of each language."""
    return {path.parents[1].name: path for path in sorted((FRONTEND / "locale").glob("*/LC_MESSAGES/django.po"))}


def main() -> int:
    """Update or check the catalogs; return 1 if something is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a text has no translation")
    check = parser.parse_args().check
    texts, found = all_texts(), []
    for language, path in catalogs().items():
        catalog = read(path) if check else merge(texts, read(path))
        found += [f"{language}: {problem}" for problem in problems(texts, catalog)]
        if not check:
            write(path, language, catalog)
    sys.stdout.write("".join(f"{problem}\n" for problem in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
