"""uv.lock, which pins all packages with hashes, and requirements.lock, which is exported from it for uv and pip.

    python -m tools.lock [options of `uv lock`, such as --upgrade]
    python -m tools.lock --check
    python -m tools.lock --platforms

The first command writes both files. `--check` compares them with pyproject.toml and with each other, without a network.
`--platforms` checks that each supported Python on x86-64 and ARM64 finds a wheel of every package.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tools.install import find_uv

ROOT = Path(__file__).resolve().parents[1]
LOCK, EXPORT = ROOT / "uv.lock", ROOT / "requirements.lock"
PYPI = "https://pypi.org/simple"
HOSTS = {"https://pypi.org", "https://files.pythonhosted.org"}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
GLIBC = "manylinux_2_31"  # the oldest with wheels of all packages
TITLE = "# Exported from uv.lock by `make lock`. A section's title lists the groups that install it.\n"

# What `uv export` selects for each group of tools/install.py, and uv itself.
_SELECTIONS = {
    "dev": ("--only-group", "dev"),
    "docs": ("--only-group", "docs"),
    "server": ("--extra", "server", "--group", "build", "--group", "models"),
    "uv": ("--only-group", "uv"),
}


class LockProblem(Exception):
    """The locks differ or cannot be written. The message says what to do."""


def compose(exports: dict[str, str]) -> str:
    """Return requirements.lock: each requirement once, in the section of the groups that install it.

    `dev` is installed after `server`, so its sections leave out the packages of the server.
    """
    groups_of: dict[str, list[str]] = {}
    for group, text in exports.items():
        for requirement in re.findall(r"^\S.*\n(?: .*\n)*", text, re.MULTILINE):
            groups_of.setdefault(requirement, []).append(group)
    sections: dict[str, list[str]] = {}
    for requirement, groups in groups_of.items():
        names = [name for name in groups if name != "dev" or "server" not in groups]
        sections.setdefault(" ".join(names), []).append(requirement)
    return TITLE + "".join(f"\n## {title}\n{''.join(sorted(sections[title]))}" for title in sorted(sections))


def remove_marker(text: str, marker: str) -> str:
    """Return an export without a marker. pip skips a requirement whose marker is false, and would install nothing on an
    unsupported platform. Without the marker it fails.
    """
    return text.replace(f" ; {marker} \\\n", " \\\n")


def find_other_hosts(lock: str) -> list[str]:
    """Return the hosts in a lock that are not PyPI's."""
    return sorted(set(re.findall(r"\w+://[^/\"]*", lock)) - HOSTS)


def write(options: list[str]) -> None:
    """Write both locks.

    Raises:
        LockProblem: uv failed, or a package comes from another index than PyPI.
    """
    run_uv("lock", "--default-index", PYPI, *options)
    if hosts := find_other_hosts(LOCK.read_text(encoding="utf-8")):
        raise LockProblem(f"uv.lock names {', '.join(hosts)}: remove this index from the configuration of uv")
    EXPORT.write_text(export(), encoding="utf-8")


def export() -> str:
    """Return requirements.lock as of uv.lock."""
    with LOCK.open("rb") as file:
        (marker,) = tomllib.load(file)["supported-markers"]
    options = ("--frozen", "--quiet", "--no-header", "--no-annotate", "--no-emit-project")
    return compose(
        {group: remove_marker(run_uv("export", *options, *names), marker) for group, names in _SELECTIONS.items()}
    )


def check() -> None:
    """Compare pyproject.toml, uv.lock and requirements.lock.

    Raises:
        LockProblem: they differ.
    """
    try:
        run_uv("lock", "--check", "--offline", "--default-index", PYPI)
    except LockProblem:  # uv tries to lock again, and describes what it misses for it
        raise LockProblem("uv.lock does not match pyproject.toml") from None
    if export() != EXPORT.read_text(encoding="utf-8"):
        raise LockProblem("requirements.lock differs from uv.lock")


def check_platforms() -> None:
    """Resolve the locked packages for each supported platform.

    Raises:
        LockProblem: a package has no wheel for one.
    """
    options = ("--dry-run", "--quiet", "--no-deps", "--no-build", "--require-hashes", "--requirement", str(EXPORT))
    for python in PYTHONS:
        for machine in MACHINES:
            platform = ("--python-version", python, "--python-platform", f"{machine}-{GLIBC}")
            run_uv("pip", "install", "--target", str(Path(sys.prefix) / "unused"), *options, *platform)
            print(f"Python {python} on {machine}: every package has a wheel")


def run_uv(*arguments: str) -> str:
    """Run uv in the checkout without variables that name an index, and return its standard output.

    Raises:
        LockProblem: it failed.
    """
    uv = find_uv()
    if uv is None:
        raise LockProblem("uv is needed: make setup")
    named = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS")
    environment = {name: value for name, value in os.environ.items() if name not in named}
    done = subprocess.run([uv, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LockProblem(f"uv {arguments[0]}: {done.stderr.strip()}")
    return done.stdout


def main() -> int:
    """Write or check the locks."""
    try:
        if sys.argv[1:] == ["--check"]:
            if find_uv() is None:
                print("uv is not installed, so the locks were not compared")
            else:
                check()
        elif sys.argv[1:] == ["--platforms"]:
            check_platforms()
        else:
            write(sys.argv[1:])
    except LockProblem as exc:
        print(f"{exc}\n`make lock` writes the locks", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
