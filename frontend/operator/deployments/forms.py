"""Forms for deployments."""

from __future__ import annotations

from typing import Any, get_args

from django import forms

from inference_worker.contract.config import DTypeName, QuantizationName
from inference_worker.contract.output_formats import AUTO, NONE, REASONING_FORMATS, TOOL_FORMATS
from millrace.apps.operations.deployments import MAX_IDLE_SECONDS
from millrace.apps.operations.models import Deployment

_NO_AUTOCOMPLETE = {"autocomplete": "off", "spellcheck": "false"}
_BOX = forms.TextInput(attrs=_NO_AUTOCOMPLETE)
_MONO = forms.TextInput(attrs=_NO_AUTOCOMPLETE | {"class": "mono"})


def _choices(*names: str) -> list[tuple[str, str]]:
    return [(name, name) for name in names]


class DeploymentForm(forms.Form):
    """The options of a deployment."""

    name = forms.CharField(
        label="Name", max_length=64, widget=_BOX, help_text="The model name that requests use, e.g. llama-3.2-1b"
    )
    source = forms.CharField(
        label="Source",
        max_length=1024,
        widget=_MONO,
        help_text="A model directory or a .gguf file on the machines of the workers, embedded, or embedded:minilm",
    )
    revision = forms.CharField(
        label="Revision",
        max_length=128,
        required=False,
        widget=_BOX,
        help_text="Identifies the content of the source. A new revision is loaded beside the old one",
    )
    dtype = forms.ChoiceField(label="Precision", choices=_choices(*get_args(DTypeName)), initial="auto")
    quantization = forms.ChoiceField(
        label="Quantization",
        choices=_choices(*get_args(QuantizationName)),
        initial="none",
        help_text="Of the weights when they are loaded",
    )
    max_model_len = forms.IntegerField(
        label="Maximum context", required=False, help_text="Tokens. Leave blank for the model's own maximum"
    )
    kv_cache_memory = forms.CharField(
        label="KV cache memory",
        max_length=16,
        required=False,
        widget=_BOX,
        help_text="A size, e.g. 2GiB, or a share, e.g. 0.9. Leave blank for the worker's setting",
    )
    block_size = forms.IntegerField(
        label="Block size", required=False, help_text="Tokens. Leave blank for the worker's setting"
    )
    pools = forms.CharField(
        label="Replicas",
        initial="default=1",
        max_length=1024,
        widget=_BOX,
        help_text="Worker pool=replicas, comma-separated. 0: one on each worker of the pool",
    )
    idle_seconds = forms.IntegerField(
        label="Scale to zero after",
        required=False,
        min_value=0,
        max_value=MAX_IDLE_SECONDS,
        help_text="Seconds without requests. Leave blank to keep it loaded",
    )
    default_max_tokens = forms.IntegerField(
        label="Default max_tokens", required=False, help_text="For requests without a limit. Leave blank for 1,024"
    )
    tool_parser = forms.ChoiceField(label="Tool parser", choices=_choices(AUTO, NONE, *TOOL_FORMATS), initial=AUTO)
    reasoning_parser = forms.ChoiceField(
        label="Reasoning parser", choices=_choices(AUTO, NONE, *REASONING_FORMATS), initial=AUTO
    )

    def __init__(self, data: Any = None, row: Deployment | None = None) -> None:
        """Create the form, of an existing deployment if `row` is given."""
        super().__init__(data, initial={} if row is None else _initial(row))
        if row is not None:
            del self.fields["name"]

    def clean_pools(self) -> dict[str, int]:
        pools = {}
        for part in self.cleaned_data["pools"].split(","):
            name, _, count = part.strip().partition("=")
            if not name or not count.isdecimal() or len(count) > 4:
                raise forms.ValidationError("Enter a pool and its number of replicas, e.g. default=1.")
            pools[name] = int(count)
        return pools

    def clean_idle_seconds(self) -> int:
        return self.cleaned_data["idle_seconds"] or 0


def _initial(row: Deployment) -> dict[str, Any]:
    names = [name for name in DeploymentForm.base_fields if name not in ("pools", "idle_seconds")]
    return {name: getattr(row, name) for name in names} | {
        "pools": ", ".join(f"{pool}={count}" for pool, count in row.pools.items()),
        "idle_seconds": row.idle_seconds or None,
    }
