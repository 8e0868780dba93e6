"""The forms of the wizard that adds a deployment: one for each source, with few fields shown and the others folded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from django import forms
from django.forms.boundfield import BoundField
from django.utils.translation import gettext as _

from frontend.core.languages import lazy_text as _lazy
from frontend.operator.deployments.forms import OwnDeploymentForm, UpstreamForm
from inference_worker.contract.settings import EMBEDDED_ENCODER
from inference_worker.contract.upstream_presets import PRESETS
from inference_worker.contract.upstreams import UpstreamEngine

Credentials = Sequence[tuple[int, str]]
_OWN_SERVER_LACKS = ("base_url", "credential_id", "secret", "allow_internal", "force")
_CLIENT_LACKS = ("command",)
_ANTHROPIC_LACKS = (*_CLIENT_LACKS, "task", "dimensions")  # its protocol has no embeddings
# Fields whose error can need a field that is folded: internal addresses, a stored credential, or force.
_NEEDS_FOLDED = frozenset({"base_url", "secret", "source"})


class CatalogForm(OwnDeploymentForm):
    """A deployment of a model that is already on the platform's machines."""

    def __init__(self, data: Any, sources: Iterable[str]) -> None:
        """Create the form.

        Args:
            sources: paths of models that other deployments serve.
        """
        super().__init__(data)
        self.fields["source"] = forms.ChoiceField(
            label=_("Model"),
            choices=[
                ("embedded", _("SmolLM2-135M-Instruct, part of Millrace")),
                (EMBEDDED_ENCODER, _("all-MiniLM-L6-v2, part of Millrace, for embeddings")),
                *((source, source) for source in sources),
            ],
            help_text=_("The models of Millrace, and those of other deployments"),
        )


class NewUpstreamForm(UpstreamForm):
    """A new deployment that a server of one kind runs."""

    force = forms.BooleanField(
        label=_lazy("Force"),
        required=False,
        help_text=_lazy("Add the upstream although its check fails from here, if its workers can reach it"),
    )

    def __init__(self, engine: UpstreamEngine, unused: Iterable[str], data: Any, credentials: Credentials) -> None:
        """Create the form.

        Args:
            unused: fields that this kind of server does not have.
        """
        super().__init__(data, None, credentials)
        self.upstream_engine = engine
        for name in ("engine", *unused):
            del self.fields[name]
        protocol = UpstreamEngine.ANTHROPIC if engine == UpstreamEngine.ANTHROPIC else UpstreamEngine.OPENAI
        presets = [(name, preset.title) for name, preset in PRESETS.items() if preset.engine == protocol]
        preset = cast(forms.ChoiceField, self.fields["preset"])
        preset.choices = [("", _("Other")), *presets]
        if protocol == UpstreamEngine.ANTHROPIC:
            preset.initial = "anthropic"

    def clean(self) -> dict[str, Any]:
        """Return the fields as options of the action."""
        return super().clean() | {"engine": self.upstream_engine.value}


@dataclass(frozen=True)
class DeploymentSource:
    """A tile of the wizard's first step, and the form of its second one."""

    slug: str
    title: str
    text: str
    icon: str
    make_form: Callable[[Any, Credentials, Sequence[str]], forms.Form]  # arguments: data, credentials and known sources
    shown: tuple[str, ...]  # fields that are not folded
    check: str = ""  # the check of its form: "fit", "models" or none


SOURCES = {
    source.slug: source
    for source in (
        DeploymentSource(
            "catalog",
            _lazy("Catalog"),
            _lazy("A model that the platform already has"),
            "models",
            lambda data, _credentials, sources: CatalogForm(data, sources),
            ("source", "name", "pools"),
            "fit",
        ),
        DeploymentSource(
            "path",
            _lazy("Path or GGUF file"),
            _lazy("A model directory or a .gguf file on the machines of the workers"),
            "layers",
            lambda data, _credentials, _sources: OwnDeploymentForm(data),
            ("source", "name", "quantization", "max_model_len", "pools"),
            "fit",
        ),
        DeploymentSource(
            "openai",
            _lazy("OpenAI-compatible"),
            _lazy("A provider, or a server in your network such as vLLM or Ollama"),
            "reference",
            lambda data, credentials, _sources: NewUpstreamForm(
                UpstreamEngine.OPENAI, _CLIENT_LACKS, data, credentials
            ),
            ("preset", "base_url", "secret", "upstream_model", "name"),
            "models",
        ),
        DeploymentSource(
            "anthropic",
            _lazy("Anthropic"),
            _lazy("Anthropic, or a server with its protocol"),
            "reference",
            lambda data, credentials, _sources: NewUpstreamForm(
                UpstreamEngine.ANTHROPIC, _ANTHROPIC_LACKS, data, credentials
            ),
            ("secret", "upstream_model", "name"),
            "models",
        ),
        DeploymentSource(
            "managed",
            _lazy("Own server"),
            _lazy("A server such as vLLM or SGLang that the worker starts and supervises"),
            "cpu",
            lambda data, credentials, _sources: NewUpstreamForm(
                UpstreamEngine.MANAGED, _OWN_SERVER_LACKS, data, credentials
            ),
            ("preset", "command", "upstream_model", "name", "pools"),
        ),
    )
}


@dataclass(frozen=True)
class FieldGroup:
    """Some fields of a form, as the template of fields reads them."""

    visible_fields: list[BoundField]
    hidden_fields: list[BoundField] = field(default_factory=list)
    non_field_errors: Sequence[object] = ()


@dataclass(frozen=True)
class FieldGroups:
    """The named fields of a form, and the others, which are folded.

    The template reads them, so that they have the errors of the action.
    """

    form: forms.Form
    names: Sequence[str]

    @property
    def shown(self) -> FieldGroup:
        found = [self.form[name] for name in self.names if name in self.form.fields]
        return FieldGroup(found, self.form.hidden_fields(), self.form.non_field_errors())

    @property
    def folded(self) -> FieldGroup:
        return FieldGroup([bound for bound in self.form.visible_fields() if bound.name not in self.names])

    @property
    def is_open(self) -> bool:
        """Return whether a folded field has an error, was changed, or can be needed to solve a shown error."""
        return self.form.is_bound and (
            any(bound.errors or bound.name in self.form.changed_data for bound in self.folded.visible_fields)
            or bool(_NEEDS_FOLDED & set(self.form.errors))
        )
