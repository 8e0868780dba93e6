"""Check of words: identifiers and texts use the words of docs/reference/glossary.md, in American spelling.

    python -m tools.check_words

`tools/words.toml` lists the words to avoid, each with a replacement:

- `spelling`: in identifiers and texts of the whole repository; matched anywhere in a word.
- `identifiers`: a part of an identifier (parts end at underscores and capitals) in the product packages, and of a name
  in the two API documents.
- `texts`: a word or phrase in docs, docstrings, comments, strings and templates of the product, unless it is quoted.
  In tests and benchmarks, only in docstrings and comments.
- `functions`: names of functions, for `tools/check_names.py`.
"""

from __future__ import annotations

import io
import re
import sys
import token
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.check_names import API_DOCUMENTS, PACKAGES

ROOT = Path(__file__).resolve().parents[1]
WORDS = Path(__file__).with_name("words.toml")
SUFFIXES = {".py", ".md", ".html", ".txt", ".js", ".css", ".typ", ".toml", ".yaml"}
PRODUCT = (*PACKAGES, "docs", "examples", "README.md", "Makefile", "manage.py")
SUPPORT = ("tests", "benchmarks")
EXCLUDED = {"migrations", "vendor", "data", "__pycache__"}  # generated files, and texts of others
EXCLUDED_FILES = {"words.toml", "glossary.md", "texts.de.js"}  # the last one is in German

QUOTES = ("`", '"', "'")  # a word between two of them is a literal: the Unix user `nobody`
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_NAMES = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEYS = re.compile(r"[A-Za-z_]\w*(?=: |:$)", re.MULTILINE)  # keys in YAML
_EXPRESSIONS = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)
_STRINGS = {tokenize.STRING, tokenize.COMMENT, getattr(token, "FSTRING_MIDDLE", tokenize.STRING)}


@dataclass(frozen=True)
class WordList:
    """The words to avoid and their replacements, by where they are looked for."""

    spelling: dict[str, str]
    identifiers: dict[str, str]
    texts: dict[str, str]

    @classmethod
    def read(cls, path: Path = WORDS) -> WordList:
        """Read the list from a TOML file."""
        lists = tomllib.loads(path.read_text(encoding="utf-8"))
        return cls(lists["spelling"], lists["identifiers"], lists["texts"])

    def text_pattern(self) -> re.Pattern[str]:
        """Return the pattern of the words and phrases of texts. A phrase may continue on the next line."""
        words = "|".join(re.escape(word).replace(r"\ ", r"[\s#*]+") for word in self.texts)
        return re.compile(rf"(?<![\w-])(?:{words})(?![\w-])" if words else r"(?!)", re.IGNORECASE)


def product_files(root: Path, names: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files to check below these directories."""
    for name in names:
        start = root / name
        for path in [start] if start.is_file() else sorted(start.rglob("*")):
            if path.name in EXCLUDED_FILES or EXCLUDED & set(path.relative_to(root).parts) or not path.is_file():
                continue
            if path.suffix in SUFFIXES or path.name == "Makefile":
                yield path


def pieces(path: Path, text: str) -> Iterator[tuple[int, bool, str]]:
    """Yield the line number of each piece of a file, whether the piece is code, and the piece."""
    if path.suffix == ".py":
        for item in tokenize.generate_tokens(io.StringIO(text).readline):
            if item.type == tokenize.NAME:
                yield item.start[0], True, item.string
            elif item.type in _STRINGS:
                yield item.start[0], False, item.string
        return
    yield 1, False, text
    if path.name in API_DOCUMENTS:
        for match in _KEYS.finditer(text):
            yield text.count("\n", 0, match.start()) + 1, True, match.group()
    if path.suffix == ".html":
        for match in _EXPRESSIONS.finditer(text):
            yield text.count("\n", 0, match.start()) + 1, True, match.group()


def comments_and_docstrings(path: Path, text: str) -> Iterator[tuple[int, bool, str]]:
    """Yield the comments and docstrings of a Python file like `pieces`."""
    starts_statement = True
    for item in tokenize.generate_tokens(io.StringIO(text).readline) if path.suffix == ".py" else ():
        if item.type == tokenize.COMMENT or (item.type == tokenize.STRING and starts_statement):
            yield item.start[0], False, item.string
        if item.type not in (tokenize.COMMENT, tokenize.NL):
            starts_statement = item.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def find_problems(path: Path, text: str, words: WordList, *, product: bool) -> list[tuple[int, str, str]]:
    """Return the line, the word and the replacement of each word to avoid."""
    found = [
        (text.count("\n", 0, match.start()) + 1, match.group(), words.spelling[match.group().lower()])
        for match in re.finditer("|".join(words.spelling) or r"(?!)", text, re.IGNORECASE)
    ]
    pattern = words.text_pattern()
    for line, is_code, piece in (pieces if product else comments_and_docstrings)(path, text):
        if is_code:
            for name in _NAMES.findall(piece):
                parts = {part.lower() for part in _PARTS.findall(name)}
                found += [(line, name, words.identifiers[part]) for part in sorted(parts & words.identifiers.keys())]
        else:
            for match in pattern.finditer(piece):
                if (
                    piece[match.start() - 1 : match.start()] in QUOTES
                    and piece[match.end() : match.end() + 1] in QUOTES
                ):
                    continue
                word = re.sub(r"[\s#*]+", " ", match.group())
                found.append((line + piece.count("\n", 0, match.start()), word, words.texts[word.lower()]))
    return sorted(set(found))


def main() -> int:
    """Print the words to avoid; return 1 if there are any."""
    words, count = WordList.read(), 0
    for names, product in ((PRODUCT, True), (SUPPORT, False)):
        for path in product_files(ROOT, names):
            for line, word, better in find_problems(path, path.read_text(encoding="utf-8"), words, product=product):
                count += 1
                print(f"{path.relative_to(ROOT)}:{line}: {word}: write {better}", file=sys.stderr)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
