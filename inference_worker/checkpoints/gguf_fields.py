"""The metadata of a GGUF file, with checks of the values' types."""

from __future__ import annotations

from typing import Any

from inference_worker.checkpoints.decoder_config import MAX_LAYERS
from inference_worker.checkpoints.gguf_file import GGUFFile
from inference_worker.checkpoints.gguf_header import GGUFError

_TENSOR_LIMIT = 1 << 16  # numbers of a tensor that is read as a list


class Fields:
    """The metadata of an open file. The keys of sizes and numbers follow the name of the architecture.

    Raises:
        GGUFError: the file is a part of a split model, or has no architecture.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        parts = file.fields.get("split.count", 1)
        if isinstance(parts, int) and parts > 1:
            hint = "merge them into one file with `llama-gguf-split --merge`"
            raise self.error(f"is one of {parts} parts, which are not supported: {hint}")
        self.architecture = self.text("general.architecture")

    def error(self, text: str) -> GGUFError:
        return GGUFError(f"{self.file.path}: {text}")

    def get(self, key: str, value_type: type | tuple[type, ...], default: Any = None) -> Any:
        value = self.file.fields.get(key, default)
        if not isinstance(value, value_type) or (isinstance(value, bool) and value_type is int):
            raise self.error(f"{key} is {value!r:.80}, which is not supported")
        return value

    def has(self, key: str) -> bool:
        """Return whether the architecture's key exists."""
        return f"{self.architecture}.{key}" in self.file.fields

    def text(self, key: str, default: str | None = None) -> str:
        return str(self.get(key, str, default))

    def size(self, key: str, default: int | None = None) -> int:
        return int(self.get(f"{self.architecture}.{key}", int, default))

    @property
    def layers(self) -> int:
        """Return the number of layers."""
        count = self.size("block_count")
        if not 1 <= count <= MAX_LAYERS:
            raise self.error(f"block_count is {count}; want 1 to {MAX_LAYERS}")
        return count

    def number(self, key: str, default: float) -> float:
        # The value is a float32, so 1e-05 reads as 9.9999997e-06. Seven digits restore it.
        return float(f"{float(self.get(f'{self.architecture}.{key}', (int, float), default)):.7g}")

    def token(self, name: str) -> int | None:
        value = self.file.fields.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def items(self, key: str, item_type: type) -> list[Any]:
        value: list[Any] = self.get(key, list)
        if not all(isinstance(item, item_type) for item in value):
            raise self.error(f"{key} is not a list of {item_type.__name__}")
        return value

    def tensor(self, name: str) -> list[float] | None:
        """Return the numbers of a small tensor, or None if the file does not have it."""
        if name not in self.file.tensors:
            return None
        tensor = self.file.tensors[name]
        if len(tensor.shape) != 1 or tensor.shape[0] > _TENSOR_LIMIT:
            raise self.error(f"tensor {name} has the shape {tensor.shape}; want a short vector")
        return [float(value) for value in next(self.file.rows(tensor, 1))[0]]
