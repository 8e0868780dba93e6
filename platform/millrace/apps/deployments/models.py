"""Deployments, which tenants' database role cannot read.

The tables are those of the app `operations` (millrace.apps.health), which has the migrations.
"""

from __future__ import annotations

from typing import ClassVar

from django.db import models

from inference_worker.contract.deployments import WantedDeployment, WantedState
from inference_worker.contract.output_formats import AUTO
from inference_worker.contract.sampling_defaults import MAX_CHARACTERS
from inference_worker.contract.settings import ModelSpec, read_kv_cache_memory
from inference_worker.contract.upstreams import UpstreamEngine, UpstreamSpec
from tenants.models import UpstreamCredential

MILLRACE = "millrace"  # the engine of deployments that workers load themselves
GENERATE = "generate"
DEFAULT_CONTEXT_LENGTH = 131_072  # tokens, of an upstream's model


class Deployment(models.Model):
    """A model that the platform serves under a name, as operators want it.

    Workers and gateways read a copy in Valkey (millrace.apps.deployments.catalog_copy).
    """

    AUDITED: ClassVar = (
        "name",
        "source",
        "revision",
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "max_model_len",
        "kv_cache_memory",
        "block_size",
        "speculation",
        "draft_model",
        "tool_parser",
        "reasoning_parser",
        "control_tokens",
        "default_max_tokens",
        "sampling_defaults",
        "truncate_inputs",
        "pools",
        "idle_seconds",
        "state",
        "engine",
        "upstream_model",
        "preset",
        "credential_id",
        "allow_internal",
        "concurrency",
        "command",
        "images",
        "tools",
        "reasoning",
        "task",
        "dimensions",
    )

    name = models.CharField(max_length=64, unique=True)
    source = models.CharField(max_length=1024)
    revision = models.CharField(max_length=128, blank=True)
    dtype = models.CharField(max_length=16, default="auto")
    quantization = models.CharField(max_length=16, default="none")
    kv_cache_dtype = models.CharField(
        max_length=8, default="auto", db_default="auto", help_text="of the stored keys and values"
    )
    max_model_len = models.IntegerField(null=True)
    kv_cache_memory = models.CharField(max_length=16, blank=True, help_text="bytes or a share; empty: the worker's")
    block_size = models.IntegerField(null=True)
    speculation = models.CharField(
        max_length=8, blank=True, default="", db_default="", help_text="auto or off; empty: the worker's"
    )
    draft_model = models.CharField(
        max_length=1024,
        blank=True,
        default="",
        db_default="",
        help_text="source, or self:quantization; empty: none",
    )
    tool_parser = models.CharField(max_length=32, default=AUTO)
    reasoning_parser = models.CharField(max_length=32, default=AUTO)
    control_tokens = models.CharField(
        max_length=8,
        default="template",
        db_default="template",
        help_text="where texts become control tokens: template or anywhere",
    )
    default_max_tokens = models.IntegerField(null=True)
    sampling_defaults = models.CharField(
        max_length=MAX_CHARACTERS, default=AUTO, db_default=AUTO, help_text="auto: of the checkpoint; none; or values"
    )
    truncate_inputs = models.BooleanField(
        default=True, db_default=True, help_text="whether inputs above an encoder's length are truncated, or refused"
    )
    pools = models.JSONField(help_text="worker pool -> number of replicas; 0: one on each worker")
    idle_seconds = models.IntegerField(default=0, help_text="0: never unloaded")
    state = models.CharField(max_length=16, choices=[(state.value, state.value) for state in WantedState])
    engine = models.CharField(
        max_length=16, default=MILLRACE, db_default=MILLRACE, help_text="millrace, or the engine of an upstream"
    )
    upstream_model = models.CharField(
        max_length=256, blank=True, default="", db_default="", help_text="the model's name at the upstream"
    )
    preset = models.CharField(max_length=32, blank=True, default="", db_default="")
    # NOTE: not PROTECT, because tenants' role, which removes their own credentials, cannot read this table.
    credential = models.ForeignKey(UpstreamCredential, on_delete=models.DO_NOTHING, null=True)
    allow_internal = models.BooleanField(default=False, db_default=False)
    concurrency = models.IntegerField(default=256, db_default=256, help_text="concurrent requests of a replica")
    command = models.TextField(blank=True, default="", db_default="", help_text="of a managed engine")
    images = models.BooleanField(default=False, db_default=False, help_text="whether the upstream's model reads images")
    tools = models.BooleanField(default=True, db_default=True, help_text="whether the upstream's model calls tools")
    reasoning = models.BooleanField(default=False, db_default=False, help_text="whether the upstream's model reasons")
    task = models.CharField(max_length=16, default=GENERATE, db_default=GENERATE, help_text="of an upstream's model")
    dimensions = models.IntegerField(null=True, help_text="numbers of a vector, if the task is embed")
    imported = models.JSONField(null=True, help_text="what MILLRACE_MODELS said when it was last imported")
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        app_label = "operations"
        ordering: ClassVar = ["name"]

    def __str__(self) -> str:
        return self.name

    @property
    def upstream(self) -> UpstreamSpec | None:
        """The server that runs the model; None for Millrace's engine."""
        if self.engine == MILLRACE:
            return None
        engine = UpstreamEngine(self.engine)
        return UpstreamSpec(
            engine,
            "" if engine == UpstreamEngine.MANAGED else self.source,
            self.upstream_model,
            preset=self.preset,
            credential=self.credential_id,
            allow_internal=self.allow_internal,
            concurrency=self.concurrency,
            command=self.command,
            context_length=self.max_model_len or DEFAULT_CONTEXT_LENGTH,
            images=self.images,
            tools=self.tools,
            reasoning=self.reasoning,
            task=self.task,  # type: ignore[arg-type]
            dimensions=self.dimensions,
        )

    @property
    def spec(self) -> ModelSpec:
        """What a replica loads."""
        return ModelSpec(
            self.name,
            self.source,
            self.dtype,  # type: ignore[arg-type]
            self.max_model_len,
            self.tool_parser,
            self.reasoning_parser,
            revision=self.revision,
            quantization=self.quantization,  # type: ignore[arg-type]
            kv_cache_memory=read_kv_cache_memory(self.kv_cache_memory),
            block_size=self.block_size,
            upstream=self.upstream,
            speculation=self.speculation,
            kv_cache_dtype=self.kv_cache_dtype,  # type: ignore[arg-type]
            draft_model=self.draft_model,
            control_tokens=self.control_tokens,  # type: ignore[arg-type]
        )

    @property
    def wanted(self) -> WantedDeployment:
        """The deployment as workers and gateways read it."""
        return WantedDeployment(
            self.spec,
            self.pools,
            WantedState(self.state),
            self.idle_seconds,
            self.default_max_tokens,
            self.sampling_defaults,
            self.truncate_inputs,
        )


class RemovedDeployment(models.Model):
    """A deployment of MILLRACE_MODELS that an operator removed. While its setting is the same, no import adds it."""

    name = models.CharField(max_length=64, unique=True)
    imported = models.JSONField(help_text="what MILLRACE_MODELS said when it was last imported")

    class Meta:
        app_label = "operations"

    def __str__(self) -> str:
        return self.name
