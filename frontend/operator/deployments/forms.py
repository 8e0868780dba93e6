"""Forms for deployments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from django import forms

from inference_worker.contract.config import DTypeName, QuantizationName, SpeculationName
from inference_worker.contract.output_formats import AUTO, NONE, REASONING_FORMATS, TOOL_FORMATS
from inference_worker.contract.upstream_presets import PRESETS
from inference_worker.contract.upstreams import UpstreamEngine
from millrace.apps.operations.deployments import MAX_COMMAND_LENGTH, MAX_CONCURRENCY, MAX_IDLE_SECONDS
from millrace.apps.operations.models import DEFAULT_CONTEXT_LENGTH, Deployment
from millrace.client.testing import PROMPT
from tenants.models import MAX_SECRET_LENGTH

_NO_AUTOCOMPLETE = {"autocomplete": "off", "spellcheck": "false"}
_BOX = forms.TextInput(attrs=_NO_AUTOCOMPLETE)
_MONO = forms.TextInput(attrs=_NO_AUTOCOMPLETE | {"class": "mono"})


_SECRET = forms.PasswordInput(attrs={"autocomplete": "off", "spellcheck": "false"})
# The options of Millrace's engine. An upstream has none of them.
_OWN_ENGINE = (
    *("source", "revision", "dtype", "quantization", "kv_cache_dtype", "kv_cache_memory", "block_size"),
    *("speculation", "draft_model", "tool_parser", "reasoning_parser"),
)


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
    kv_cache_dtype = forms.ChoiceField(
        label="KV cache precision",
        required=False,
        choices=[("auto", "Precision of the model"), *_choices("int8", "fp8")],
        initial="auto",
        help_text="int8 on CPUs, fp8 on GPUs. Fits about twice the tokens",
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
    speculation = forms.ChoiceField(
        label="Speculative decoding",
        required=False,
        choices=[("", "Worker's setting"), *_choices(*get_args(SpeculationName))],
    )
    draft_model = forms.CharField(
        label="Draft model",
        max_length=1024,
        required=False,
        widget=_MONO,
        help_text="A source with the same tokenizer, or the quantized model, e.g. self:int8. Leave blank for none",
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

    def clean_kv_cache_dtype(self) -> str:
        return self.cleaned_data["kv_cache_dtype"] or "auto"

    def clean_idle_seconds(self) -> int:
        return self.cleaned_data["idle_seconds"] or 0


class UpstreamForm(DeploymentForm):
    """The options of a deployment that another server runs."""

    engine = forms.ChoiceField(
        label="Runs on",
        choices=[
            (UpstreamEngine.OPENAI.value, "An OpenAI-compatible server"),
            (UpstreamEngine.ANTHROPIC.value, "An Anthropic-compatible server"),
            (UpstreamEngine.MANAGED.value, "A server that the worker starts"),
        ],
    )
    preset = forms.ChoiceField(
        label="Provider",
        required=False,
        choices=[("", "Other"), *((name, preset.title) for name, preset in PRESETS.items())],
        help_text="Sets the authentication and the parameters that requests may have",
    )
    base_url = forms.CharField(
        label="Base URL",
        max_length=1024,
        required=False,
        widget=_MONO,
        help_text="With the version, e.g. https://api.example.com/v1. Leave blank for the provider's URL",
    )
    upstream_model = forms.CharField(
        label="Upstream model", max_length=256, widget=_MONO, help_text="The model's name at the upstream"
    )
    command = forms.CharField(
        label="Command",
        max_length=MAX_COMMAND_LENGTH,
        required=False,
        widget=_MONO,
        help_text="Of a server that the worker starts, e.g. vllm serve {model} --host {host} --port {port}",
    )
    credential_id = forms.TypedChoiceField(
        label="Credential", required=False, coerce=int, empty_value=None, help_text="Stored API key of the upstream"
    )
    secret = forms.CharField(
        label="New API key",
        max_length=MAX_SECRET_LENGTH,
        required=False,
        widget=_SECRET,
        help_text="Instead of a credential. Stored encrypted with the deployment's name, and never shown again",
    )
    allow_internal = forms.BooleanField(
        label="Allow internal addresses", required=False, help_text="For servers in your own network"
    )
    concurrency = forms.IntegerField(
        label="Concurrent requests", initial=256, min_value=1, max_value=MAX_CONCURRENCY, help_text="Per replica"
    )
    images = forms.BooleanField(label="Image input", required=False)
    tools = forms.BooleanField(label="Tool calls", required=False, initial=True)
    reasoning = forms.BooleanField(label="Reasoning", required=False)
    task = forms.ChoiceField(label="Task", choices=_choices("generate", "embed"), initial="generate")
    dimensions = forms.IntegerField(label="Dimensions", required=False, help_text="Vector size, if the task is embed")

    field_order = (
        *("name", "engine", "preset", "base_url", "command", "upstream_model", "credential_id", "secret"),
        *("allow_internal", "max_model_len", "concurrency", "pools"),
    )

    def __init__(
        self, data: Any = None, row: Deployment | None = None, credentials: Sequence[tuple[int, str]] = ()
    ) -> None:
        """Create the form with the platform's credentials to choose from, by ID."""
        super().__init__(data, row)
        for name in _OWN_ENGINE:
            del self.fields[name]
        self.fields["max_model_len"].help_text = f"Tokens. Leave blank for {DEFAULT_CONTEXT_LENGTH:,}"
        choice = self.fields["credential_id"]
        choice.choices = [("", "None"), *credentials]  # type: ignore[attr-defined]
        if row is not None:
            del self.fields["secret"]

    def clean(self) -> dict[str, Any]:
        """Return the fields as options of the action."""
        cleaned = super().clean() or self.cleaned_data
        cleaned["source"] = cleaned.pop("base_url", "")
        if not cleaned.get("secret"):
            cleaned.pop("secret", None)
        return cleaned


class TestCallForm(forms.Form):
    """A test call of a deployment, which an API key pays for."""

    __test__ = False  # for pytest
    api_key = forms.CharField(
        label="API key",
        max_length=200,
        widget=_SECRET,
        help_text="The request is billed to its tenant. The key is not stored",
    )
    prompt = forms.CharField(label="Prompt", max_length=2000, initial=PROMPT)


def _initial(row: Deployment) -> dict[str, Any]:
    names = [name for name in DeploymentForm.base_fields if name not in ("pools", "idle_seconds")]
    names += [name for name in UpstreamForm.declared_fields if name not in ("base_url", "secret")]
    return {name: getattr(row, name) for name in dict.fromkeys(names)} | {
        "base_url": row.source if row.upstream is not None and row.upstream.base_url else "",
        "pools": ", ".join(f"{pool}={count}" for pool, count in row.pools.items()),
        "idle_seconds": row.idle_seconds or None,
    }
