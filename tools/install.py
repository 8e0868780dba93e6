"""Installation of the locked packages and of PyTorch into the environment of this Python.

    python -m tools.install server|dev|docs

uv installs the packages, or pip if uv cannot be installed or INSTALLER=pip is set. The lock does not contain PyTorch,
whose build depends on the machine. TORCH_INDEX is the URL of a package index with the build to install.
The environment may be empty, so this module imports only the standard library.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GROUPS = ("server", "dev", "docs")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_SECONDS = 3
MIN_UV = (0, 5)  # --default-index
MIN_PIP = (22, 3)  # --python

# Options of pip's configuration, with the variable by which uv reads the same.
_UV_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "HTTPS_PROXY",
}
_SECTIONS = ("global", "install", ":env:")  # sections of pip's configuration; later ones take precedence


class InstallationFailed(Exception):
    """The installation failed. The message says what to do."""


@dataclass(frozen=True)
class Installer:
    """uv or pip, with the options that name an index."""

    command: tuple[str, ...]
    index_option: str
    extra_index_option: str
    is_uv: bool


@dataclass(frozen=True)
class TorchBuild:
    """The build of PyTorch for this machine."""

    reason: str
    index: str | None = None  # None: the configured index
    has_other_packages: bool = False  # the index also has what its build depends on


def read_section(text: str, group: str) -> str:
    """Return the requirements of a group. Titles of sections start with `##` and list the groups that install them."""
    lines, is_wanted = [], False
    for line in text.splitlines(keepends=True):
        if line.startswith("##"):
            is_wanted = group in line.split()
        elif is_wanted:
            lines.append(line)
    return "".join(lines)


def read_versions(text: str) -> list[str]:
    """Return the requirements without their hashes."""
    return [match[0].rstrip(" \\") for match in re.finditer(r"^[A-Za-z0-9].*$", text, re.MULTILINE)]


def read_torch_pins(root: Path = ROOT) -> list[str]:
    """Return the pinned requirements of torch and triton."""
    with (root / "pyproject.toml").open("rb") as file:
        return list(tomllib.load(file)["dependency-groups"]["torch"])


def make_uv_installer(uv: str) -> Installer:
    """Return the installer that runs uv, without this checkout's [tool.uv], which excludes PyTorch from the lock."""
    command = (uv, "pip", "install", "--project", "/", "--python", sys.executable)
    return Installer(command, "--default-index", "--index", is_uv=True)


def make_pip_installer(pip: Iterable[str]) -> Installer:
    """Return the installer that runs pip. It compiles no modules: Python compiles those that it imports."""
    command = (*pip, "--disable-pip-version-check", "--no-input", "install", "--no-compile")
    return Installer(command, "--index-url", "--extra-index-url", is_uv=False)


def uv_environment(pip_config: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that give uv the indexes of pip's configuration. Variables that are set take precedence.

    Args:
        pip_config: the output of `pip config list`.
        environment: the variables that are set.
    """
    found = re.findall(rf"^({'|'.join(_SECTIONS)})\.([a-z-]+)=(.+)$", pip_config, re.MULTILINE)
    found.sort(key=lambda option: _SECTIONS.index(option[0]))
    options = {name: str(ast.literal_eval(value)).split() for _, name, value in found if name in _UV_VARIABLES}
    variables = {
        _UV_VARIABLES[name]: ("," if name == "find-links" else " ").join(values)
        for name, values in options.items()
        if _UV_VARIABLES[name] not in environment
    }
    if "UV_INDEX" in variables:
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # pip's; uv would take the first index that has a package
    return variables


def detect_gpu(root: Path = Path("/")) -> str | None:
    """Return the maker of this machine's GPU, `NVIDIA` or `AMD`, or None without one."""
    # The last of NVIDIA's is its library in the Windows Subsystem for Linux.
    for path in ("proc/driver/nvidia/version", "dev/nvidiactl", "usr/lib/wsl/lib/libcuda.so.1"):
        if (root / path).exists():
            return "NVIDIA"
    return "AMD" if (root / "dev/kfd").exists() else None


def choose_torch(
    installed: str | None,
    system: str,
    gpu: str | None,
    setting: str,
    offered_version: Callable[[], str | None],
    index_answers: Callable[[str], bool],
) -> TorchBuild:
    """Return the build of PyTorch for a machine.

    Args:
        installed: the installed version, if it is the pinned one.
        system: the operating system, as in `platform.system()`.
        gpu: the maker of the GPU, or None.
        setting: the value of TORCH_INDEX, or an empty string.
        offered_version: returns the version that the configured indexes offer.
        index_answers: returns whether an index can be reached.
    """
    if installed:
        return TorchBuild(f"{installed} is installed. To install another build, run `make clean` first")
    if setting:
        return TorchBuild(f"the build of TORCH_INDEX={hide_credentials(setting)}", setting, has_other_packages=True)
    if gpu == "NVIDIA":
        return TorchBuild("the default build, because this machine has an NVIDIA GPU")
    if system != "Linux":
        return TorchBuild(f"the default build, which has no CUDA on {system}")
    because = "because this machine has no NVIDIA GPU"
    if gpu == "AMD":
        because += ". For its AMD GPU, set TORCH_INDEX to PyTorch's index for your version of ROCm"
    if "+cpu" in (offered_version() or ""):
        return TorchBuild(f"the CPU build of the configured package index, {because}")
    if index_answers(CPU_INDEX):
        return TorchBuild(f"the CPU build of {CPU_INDEX}, {because}", CPU_INDEX)
    return TorchBuild(
        "the default build with CUDA, a download of 2.8 GB instead of 0.4 GB: this machine has no NVIDIA GPU, but"
        f" {CPU_INDEX} cannot be reached. To take a CPU build from another index, stop and set TORCH_INDEX to its URL"
    )


def torch_commands(build: TorchBuild, installer: Installer, pins: list[str], constraints: Path) -> Iterator[list[str]]:
    """Return the commands that install PyTorch, each to be run before the next one is taken.

    A build of another index than the configured one is installed alone. A second command installs its dependencies, in
    the locked versions.
    """
    command, torch = list(installer.command), pins[0]
    if build.index is not None:
        yield [*command, "--no-deps", installer.index_option, build.index, torch]
        importlib.invalidate_caches()
    extra = [installer.extra_index_option, build.index] if build.index and build.has_other_packages else []
    yield [*command, *([torch] if requires_triton() else pins), "--constraint", str(constraints), *extra]


def requires_triton() -> bool:
    """Return whether the installed build of torch requires its own build of triton, as those with CUDA or ROCm do."""
    try:
        requirements = metadata.requires("torch") or ()
    except metadata.PackageNotFoundError:
        return False
    return any(re.match(r"(pytorch-)?triton", requirement) for requirement in requirements)


class Setup:
    """The installation of one group, with its log and the files that it passes to the installer."""

    def __init__(self, directory: Path = Path(sys.prefix)) -> None:
        self._directory = directory
        self._log = directory / "install.log"
        self._lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")

    def install(self, group: str) -> None:
        """Install a group's packages, and with the server also PyTorch and this checkout.

        Raises:
            InstallationFailed: a command failed.
        """
        if group == "server":
            self._log.unlink(missing_ok=True)
        installer = self.find_installer()
        print("  locked packages", flush=True)
        self._install_locked(installer, group)
        if group == "server":
            self._install_torch(installer)
            print("  Millrace", flush=True)
            self._run([*installer.command, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)])

    def _install_locked(self, installer: Installer, group: str) -> None:
        file = self._directory / f"requirements-{group}.txt"
        file.write_text(read_section(self._lock, group), encoding="utf-8")
        self._run([*installer.command, "--no-deps", "--require-hashes", "--requirement", str(file)])

    def _install_torch(self, installer: Installer) -> None:
        constraints = self._directory / "constraints.txt"
        constraints.write_text("\n".join(read_versions(read_section(self._lock, "server"))), encoding="utf-8")
        pins = read_torch_pins()
        build = choose_torch(
            installed_version(pins[0]),
            platform.system(),
            detect_gpu(),
            os.environ.get("TORCH_INDEX", ""),
            lambda: self._offered_version(installer, pins[0]),
            index_answers,
        )
        print(f"  PyTorch: {build.reason}", flush=True)
        for command in torch_commands(build, installer, pins, constraints):
            self._run(command)
        importlib.invalidate_caches()
        print(f"    torch {metadata.version('torch')}", flush=True)

    def _offered_version(self, installer: Installer, requirement: str) -> str | None:
        """Return the version of torch that the configured indexes offer for this machine."""
        command = [*installer.command, "--no-deps", "--dry-run", requirement]
        if installer.is_uv:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            found = re.search(r"^ \+ torch==(\S+)", done.stderr, re.MULTILINE)
            return found[1] if found else None
        command += ["--ignore-installed", "--quiet", "--report", "-"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return str(json.loads(done.stdout)["install"][0]["metadata"]["version"]) if done.returncode == 0 else None

    def find_installer(self) -> Installer:
        """Return uv, which is installed if it is missing, else pip.

        Raises:
            InstallationFailed: there is no pip either.
        """
        wanted = os.environ.get("INSTALLER", "uv")
        if wanted not in ("uv", "pip"):
            raise InstallationFailed(f"INSTALLER={wanted}: set it to uv or pip")
        pip = find_pip()
        uv = find_uv() if wanted == "uv" else None
        if wanted == "uv" and uv is None:
            pip = pip or self._install_pip()
            try:
                self._install_locked(make_pip_installer(pip), "uv")
            except InstallationFailed:
                print("  uv cannot be installed, so pip installs the packages, which takes longer", flush=True)
            uv = find_uv()
        if uv is None:
            return make_pip_installer(pip or self._install_pip())
        if pip is not None:
            listed = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=False)
            os.environ.update(uv_environment(listed.stdout, os.environ))
        return make_uv_installer(uv)

    def _install_pip(self) -> tuple[str, ...]:
        try:
            self._run([sys.executable, "-m", "ensurepip"])
        except InstallationFailed:
            raise InstallationFailed(
                f"neither uv nor pip is available: install the pip or venv module of {sys.base_prefix}"
            ) from None
        return sys.executable, "-m", "pip"

    def _run(self, command: list[str]) -> None:
        with self._log.open("a", encoding="utf-8") as log:
            print("+", hide_credentials(" ".join(command)), file=log, flush=True)
            done = subprocess.run(command, stdout=log, stderr=log, check=False)
        if done.returncode != 0:
            tail = "".join(self._log.read_text(encoding="utf-8").splitlines(keepends=True)[-20:])
            raise InstallationFailed(f"{tail}the installation failed; all output is in {self._log}")


def installed_version(pin: str) -> str | None:
    """Return the installed version of a pinned package, such as `2.13.0+cpu`; None if it is another one."""
    name, _, pinned = pin.partition("==")
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
    return version if version.partition("+")[0] == pinned else None


def hide_credentials(text: str) -> str:
    """Return the text without user names and passwords in its URLs."""
    return re.sub(r"//[^/@\s]+@", "//", text)


def find_uv() -> str | None:
    """Return the path of uv: this environment's, or the one on PATH; None without one that is new enough."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    uv = shutil.which("uv", path=path)
    if uv is None:
        return None
    version = _version_of([uv, "--version"])
    return uv if version >= MIN_UV else None


def find_pip() -> tuple[str, ...] | None:
    """Return the command of pip: this environment's, or the one of the Python that made the environment."""
    if importlib.util.find_spec("pip") is not None:
        return sys.executable, "-m", "pip"
    base = str(getattr(sys, "_base_executable", sys.executable))
    if base != sys.executable and _version_of([base, "-m", "pip", "--version"]) >= MIN_PIP:
        return base, "-m", "pip", "--python", sys.executable
    return None


def _version_of(command: list[str]) -> tuple[int, ...]:
    """Return the first two numbers of the version that a program prints; none if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ()
    found = re.search(r"(\d+)\.(\d+)", done.stdout) if done.returncode == 0 else None
    return (int(found[1]), int(found[2])) if found else ()


def index_answers(url: str) -> bool:
    """Return whether a package index answers within PROBE_SECONDS. The limit includes the name's resolution."""
    answers: list[bool] = []

    def request() -> None:
        try:
            urllib.request.urlopen(f"{url}/torch/", timeout=PROBE_SECONDS).close()  # noqa: S310  (a fixed https URL)
        except (urllib.error.URLError, OSError, ValueError):
            return
        answers.append(True)

    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return bool(answers)


def main() -> int:
    """Install the group that the command line names."""
    if len(sys.argv) != 2 or sys.argv[1] not in GROUPS:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        Setup().install(sys.argv[1])
    except InstallationFailed as exc:
        print(f"make: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
