"""Builds the files of the packages that are generated from others and are not in git.

    python -m tools.build_files

- The modules of `millrace.client` with the operations and types of the API, from docs/management-openapi.yaml.
- The description of the plain commands of `millrace`, from its table and the same document.
- The compiled translations of the console and the texts of its scripts, from frontend/locale.

`make setup` and the build of a wheel run this. It imports neither Django nor the platform. Files are built only if what
they are generated from has changed.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tools import command_table, generate_client, messages
from tools.openapi.formatting import read_yaml

ROOT = Path(__file__).resolve().parents[1]
CLIENT = ROOT / "platform" / "millrace" / "client"
CLIENT_MODULES = ("models.py", "resources.py", "async_resources.py")
COMMANDS = ROOT / "platform" / "millrace" / "cli" / "plain_commands.toml"
STATE = ROOT / "build" / "generated.json"  # the digest of each file's sources when it was built


@dataclass(frozen=True)
class GeneratedFiles:
    """Files that are built together from the same sources."""

    title: str
    sources: tuple[Path, ...]
    outputs: tuple[Path, ...]
    generate: Callable[[], Iterable[bytes]]  # the contents of the outputs

    def digest(self) -> str:
        """Return the digest of the sources."""
        contents = hashlib.sha256()
        for path in self.sources:
            contents.update(hashlib.sha256(path.read_bytes()).digest())
        return contents.hexdigest()


def generated_files() -> list[GeneratedFiles]:
    """Return all files to build."""
    document = ROOT / "docs" / "management-openapi.yaml"
    found = [
        GeneratedFiles(
            "client of the management API",
            (document, Path(generate_client.__file__)),
            tuple(CLIENT / name for name in CLIENT_MODULES),
            lambda: client_modules(document).values(),
        ),
        GeneratedFiles(
            "plain commands",
            (document, COMMANDS, Path(command_table.__file__), Path(generate_client.__file__)),
            (COMMANDS.with_suffix(".json"),),
            lambda: [command_descriptions(document)],
        ),
    ]
    for language, path in messages.catalogs().items():
        found.append(
            GeneratedFiles(
                f"translations: {language}",
                (path, *messages.scripts(), Path(messages.__file__)),
                (path.with_suffix(".mo"), messages.SCRIPTS / f"texts.{language}.js"),
                partial(_translations, language, path),
            )
        )
    return found


def client_modules(document: Path) -> dict[str, bytes]:
    """Return the contents of the client's modules by file name."""
    modules = generate_client.generate(read_yaml(document.read_text(encoding="utf-8")))
    return {name: modules[name].encode() for name in CLIENT_MODULES}


def command_descriptions(document: Path) -> bytes:
    """Return the description of the plain commands as JSON."""
    table = tomllib.loads(COMMANDS.read_text(encoding="utf-8"))
    described = command_table.describe_commands(table, read_yaml(document.read_text(encoding="utf-8")))
    return json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()


def _translations(language: str, path: Path) -> tuple[bytes, bytes]:
    catalog = messages.read(path)
    return messages.compile_catalog(language, catalog), messages.script_file(language, catalog).encode()


def build(files: Iterable[GeneratedFiles], state: Path) -> list[str]:
    """Build the files whose sources have changed since `state` was written. Return the titles of what was built."""
    known: dict[str, str] = json.loads(state.read_text(encoding="utf-8")) if state.exists() else {}
    built = []
    for group in files:
        digest = group.digest()
        if known.get(group.title) == digest and all(output.exists() for output in group.outputs):
            continue
        for output, content in zip(group.outputs, group.generate(), strict=True):
            output.write_bytes(content)
        known[group.title] = digest
        built.append(group.title)
    if built:
        state.parent.mkdir(exist_ok=True)
        state.write_text(json.dumps(known, indent=0), encoding="utf-8")
    return built


def main() -> None:
    """Build what has changed, and print its title."""
    for title in build(generated_files(), STATE):
        print(f"  {title}")


if __name__ == "__main__":
    main()
