"""Forms for deployments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from django import forms
from django.utils.translation import gettext as _

from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import exact
from frontend.core.plain_text_field import PLAIN_TEXT
from inference_worker.contract.engine_config import DTypeName, QuantizationName, SpeculationName
from inference_worker.contract.output_formats import AUTO, NONE, REASONING_FORMATS, TOOL_FORMATS
from inference_worker.contract.sampling_defaults import MAX_CHARACTERS
from inference_worker.contract.upstream_presets import PRESETS
from inference_worker.contract.upstreams import UpstreamEngine
from millrace.apps.deployments.models import DEFAULT_CONTEXT_LENGTH, Deployment
from millrace.apps.deployments.value_checks import MAX_COMMAND_LENGTH, MAX_CONCURRENCY, MAX_IDLE_SECONDS
from millrace.client.testing import PROMPT
from tenants.models import MAX_SECRET_LENGTH

_BOX = forms.TextInput(attrs=PLAIN_TEXT)
_MONO = forms.TextInput(attrs=PLAIN_TEXT | {"class": "mono"})


_SECRET = forms.PasswordInput(attrs=PLAIN_TEXT)
# The options of Millrace's engine. An upstream has none of them.
_OWN_ENGINE = (
    *("source", "revision", "dtype", "quantization", "kv_cache_dtype", "kv_cache_memory", "block_size"),
    *("speculation", "draft_model", "tool_parser", "reasoning_parser", "control_tokens", "sampling_defaults"),
    "truncate_inputs",
)


def _choices(*names: str) -> list[tuple[str, str]]:
    return [(name, name) for name in names]


class DeploymentForm(forms.Form):
    """The options of a deployment."""

    name = forms.CharField(
        label=_lazy("Name"),
        max_length=64,
        widget=_BOX,
        help_text=_lazy("The model name that requests use, e.g. llama-3.2-1b"),
    )
    source = forms.CharField(
        label=_lazy("Source"),
        max_length=1024,
        widget=_MONO,
        help_text=_lazy(
            "A model directory or a .gguf file on the machines of the workers, embedded, or embedded:minilm"
        ),
    )
    revision = forms.CharField(
        label=_lazy("Revision"),
        max_length=128,
        required=False,
        widget=_BOX,
        help_text=_lazy("Identifies the content of the source. A new revision is loaded beside the old one"),
    )
    dtype = forms.ChoiceField(label=_lazy("Precision"), choices=_choices(*get_args(DTypeName)), initial="auto")
    quantization = forms.ChoiceField(
        label=_lazy("Quantization"),
        choices=_choices(*get_args(QuantizationName)),
        initial="none",
        help_text=_lazy("Of the weights when they are loaded"),
    )
    kv_cache_dtype = forms.ChoiceField(
        label=_lazy("KV cache precision"),
        required=False,
        choices=[("auto", _lazy("Precision of the model")), *_choices("int8", "fp8")],
        initial="auto",
        help_text=_lazy("int8 on CPUs, fp8 on GPUs. Fits about twice the tokens"),
    )
    max_model_len = forms.IntegerField(
        label=_lazy("Maximum context"),
        required=False,
        help_text=_lazy("Tokens. Leave blank for the model's own maximum"),
    )
    kv_cache_memory = forms.CharField(
        label=_lazy("KV cache memory"),
        max_length=16,
        required=False,
        widget=_BOX,
        help_text=_lazy("A size, e.g. 2GiB, or a share, e.g. 0.9. Leave blank for the worker's setting"),
    )
    block_size = forms.IntegerField(
        label=_lazy("Block size"), required=False, help_text=_lazy("Tokens. Leave blank for the worker's setting")
    )
    speculation = forms.ChoiceField(
        label=_lazy("Speculative decoding"),
        required=False,
        choices=[("", _lazy("Worker's setting")), *_choices(*get_args(SpeculationName))],
    )
    draft_model = forms.CharField(
        label=_lazy("Draft model"),
        max_length=1024,
        required=False,
        widget=_MONO,
        help_text=_lazy(
            "A source with the same tokenizer, or the quantized model, e.g. self:int8. Leave blank for none"
        ),
    )
    pools = forms.CharField(
        label=_lazy("Replicas"),
        initial="default=1",
        max_length=1024,
        widget=_BOX,
        help_text=_lazy("Worker pool=replicas, comma-separated. 0: one on each worker of the pool"),
    )
    idle_seconds = forms.IntegerField(
        label=_lazy("Scale to zero after"),
        required=False,
        min_value=0,
        max_value=MAX_IDLE_SECONDS,
        help_text=_lazy("Seconds without requests. Leave blank to keep it loaded"),
    )
    default_max_tokens = forms.IntegerField(
        label=_lazy("Default max_tokens"),
        required=False,
        help_text=_lazy("For requests without a limit. Leave blank for 1,024"),
    )
    sampling_defaults = forms.CharField(
        label=_lazy("Sampling defaults"),
        required=False,
        max_length=MAX_CHARACTERS,
        help_text=_lazy("For requests that do not set them: auto, none, or values such as temperature=0.6,top_p=0.95"),
    )
    tool_parser = forms.ChoiceField(
        label=_lazy("Tool parser"), choices=_choices(AUTO, NONE, *TOOL_FORMATS), initial=AUTO
    )
    reasoning_parser = forms.ChoiceField(
        label=_lazy("Reasoning parser"), choices=_choices(AUTO, NONE, *REASONING_FORMATS), initial=AUTO
    )
    control_tokens = forms.ChoiceField(
        label=_lazy("Control tokens"),
        choices=[
            ("template", _lazy("Only in the chat template")),
            ("anywhere", _lazy("Also in messages and tools")),
        ],
        initial="template",
        help_text=_lazy("Messages and tools that may contain control tokens can forge turns of a conversation"),
    )

    truncate_inputs = forms.BooleanField(
        label=_lazy("Truncate inputs"),
        required=False,
        initial=True,
        help_text=_lazy(
            "Of embedding models and cross-encoders. Otherwise inputs above the model's length are refused"
        ),
    )

    def __init__(self, data: Any = None, row: Deployment | None = None) -> None:
        """Create the form, of an existing deployment if `row` is given."""
        super().__init__(data, initial={} if row is None else _initial(row))
        if row is not None:
            del self.fields["name"]

    def clean_pools(self) -> dict[str, int]:
        pools = {}
        for part in self.cleaned_data["pools"].split(","):
            name, _sign, count = part.strip().partition("=")
            if not name or not count.isdecimal() or len(count) > 4:
                raise forms.ValidationError(_("Enter a pool and its number of replicas, e.g. default=1."))
            pools[name] = int(count)
        return pools

    def clean_kv_cache_dtype(self) -> str:
        return self.cleaned_data["kv_cache_dtype"] or "auto"

    def clean_sampling_defaults(self) -> str:
        return self.cleaned_data["sampling_defaults"] or AUTO

    def clean_idle_seconds(self) -> int:
        return self.cleaned_data["idle_seconds"] or 0


class OwnDeploymentForm(DeploymentForm):
    """The options of a deployment of Millrace's engine."""

    force = forms.BooleanField(
        label=_lazy("Force"),
        required=False,
        help_text=_lazy("Use a source whose check fails on this machine, if its workers can load it"),
    )


class UpstreamForm(DeploymentForm):
    """The options of a deployment that another server runs."""

    engine = forms.ChoiceField(
        label=_lazy("Runs on"),
        choices=[
            (UpstreamEngine.OPENAI.value, _lazy("An OpenAI-compatible server")),
            (UpstreamEngine.ANTHROPIC.value, _lazy("An Anthropic-compatible server")),
            (UpstreamEngine.MANAGED.value, _lazy("A server that the worker starts")),
        ],
    )
    preset = forms.ChoiceField(
        label=_lazy("Provider"),
        required=False,
        choices=[("", _lazy("Other")), *((name, preset.title) for name, preset in PRESETS.items())],
        help_text=_lazy("Sets the authentication and the parameters that requests may have"),
    )
    base_url = forms.CharField(
        label=_lazy("Base URL"),
        max_length=1024,
        required=False,
        widget=_MONO,
        help_text=_lazy("With the version, e.g. https://api.example.com/v1. Leave blank for the provider's URL"),
    )
    upstream_model = forms.CharField(
        label=_lazy("Upstream model"), max_length=256, widget=_MONO, help_text=_lazy("The model's name at the upstream")
    )
    command = forms.CharField(
        label=_lazy("Command"),
        max_length=MAX_COMMAND_LENGTH,
        required=False,
        widget=_MONO,
        help_text=_lazy("Of a server that the worker starts, e.g. vllm serve {model} --host {host} --port {port}"),
    )
    credential_id = forms.TypedChoiceField(
        label=_lazy("Credential"),
        required=False,
        coerce=int,
        empty_value=None,
        help_text=_lazy("Stored API key of the upstream"),
    )
    secret = forms.CharField(
        label=_lazy("New API key"),
        max_length=MAX_SECRET_LENGTH,
        required=False,
        widget=_SECRET,
        help_text=_lazy("Instead of a credential. Stored encrypted with the deployment's name, and never shown again"),
    )
    allow_internal = forms.BooleanField(
        label=_lazy("Allow internal addresses"), required=False, help_text=_lazy("For servers in your own network")
    )
    concurrency = forms.IntegerField(
        label=_lazy("Concurrent requests"),
        initial=256,
        min_value=1,
        max_value=MAX_CONCURRENCY,
        help_text=_lazy("Per replica"),
    )
    images = forms.BooleanField(label=_lazy("Image input"), required=False)
    tools = forms.BooleanField(label=_lazy("Tool calls"), required=False, initial=True)
    reasoning = forms.BooleanField(label=_lazy("Reasoning"), required=False)
    task = forms.ChoiceField(label=_lazy("Task"), choices=_choices("generate", "embed"), initial="generate")
    dimensions = forms.IntegerField(
        label=_lazy("Dimensions"), required=False, help_text=_lazy("Vector size, if the task is embed")
    )

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
        self.fields["max_model_len"].help_text = _("Tokens. Leave blank for %(limit)s") % {
            "limit": exact(DEFAULT_CONTEXT_LENGTH)
        }
        choice = self.fields["credential_id"]
        choice.choices = [("", _("None")), *credentials]  # type: ignore[attr-defined]
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
    api_key = forms.RegexField(
        r"^[\x21-\x7e]+\Z",  # in a header, whose error would contain the key
        label=_lazy("API key"),
        max_length=200,
        strip=True,
        widget=_SECRET,
        help_text=_lazy("The request is billed to its tenant. The key is not stored"),
    )
    prompt = forms.CharField(label=_lazy("Prompt"), max_length=2000, initial=PROMPT)


def _initial(row: Deployment) -> dict[str, Any]:
    names = [name for name in DeploymentForm.base_fields if name not in ("pools", "idle_seconds")]
    names += [name for name in UpstreamForm.declared_fields if name not in ("base_url", "secret")]
    return {name: getattr(row, name) for name in dict.fromkeys(names)} | {
        "base_url": row.source if row.upstream is not None and row.upstream.base_url else "",
        "pools": ", ".join(f"{pool}={count}" for pool, count in row.pools.items()),
        "idle_seconds": row.idle_seconds or None,
    }
