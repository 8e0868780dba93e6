"""Management API of deployments, below /api/operator/deployments."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from billing.currencies.amounts import NANO_DIGITS, decimal
from billing.models import PriceVersion
from billing.rates.price_book import NewPrice
from billing.rates.pricing import Tier
from inference_worker.contract.deployments import MAX_DEPLOYMENTS, WantedState
from inference_worker.contract.sampling_defaults import MAX_CHARACTERS
from millrace.apps.deployments import deployment_checks, deployments, offered_prices, served_deployments, value_checks
from millrace.apps.deployments.deployment_status import DeploymentState, DeploymentStatus, deployment_status
from millrace.apps.deployments.models import Deployment
from tenants.api.idempotency import idempotent
from tenants.api.operators import OperatorView
from tenants.api.serializers import MAX_BIGINT, ServedModelSerializer, StrictSerializer
from tenants.api.views import find_first, person, validate_body
from tenants.models import MAX_SECRET_LENGTH

STATES: dict[str, WantedState] = {
    "load": WantedState.LOADED,
    "drain": WantedState.DRAINED,
    "unload": WantedState.UNLOADED,
}
WANTED_STATES = [state.value for state in WantedState]
DEPLOYMENT_STATES = [state.value for state in DeploymentState]
TASKS = ("generate", "embed")
_UNCHECKED = "Why the options were not checked against the pools' workers; empty if they were, or are the defaults."
_MAX_INT = 2**31 - 1


class DeploymentOptionsSerializer(StrictSerializer):
    """The options of a deployment. What they do is described in docs/guides/deployments.md."""

    revision = serializers.CharField(required=False, allow_blank=True, max_length=128, help_text="Of the source.")
    dtype = serializers.CharField(required=False, max_length=16, help_text="auto, bfloat16, float16 or float32.")
    quantization = serializers.CharField(required=False, max_length=16, help_text="Of the weights; none by default.")
    kv_cache_dtype = serializers.CharField(
        required=False, max_length=8, help_text="Of the stored keys and values: auto, int8 or fp8."
    )
    max_model_len = serializers.IntegerField(
        required=False, allow_null=True, max_value=_MAX_INT, help_text="Tokens of prompt and completion together."
    )
    speculation = serializers.CharField(
        required=False,
        allow_blank=True,
        max_length=8,
        help_text="Speculative decoding: auto or off; empty: the worker's.",
    )
    draft_model = serializers.CharField(
        required=False,
        allow_blank=True,
        max_length=1024,
        help_text="Draft model of speculative decoding: a source, or self:int8; empty: none.",
    )
    kv_cache_memory = serializers.CharField(
        required=False, allow_blank=True, max_length=16, help_text="A size such as 2GiB, or a share such as 0.9."
    )
    block_size = serializers.IntegerField(
        required=False, allow_null=True, max_value=_MAX_INT, help_text="Tokens of a KV cache block."
    )
    tool_parser = serializers.CharField(required=False, max_length=32)
    reasoning_parser = serializers.CharField(required=False, max_length=32)
    control_tokens = serializers.CharField(
        required=False,
        max_length=8,
        help_text="Where texts become control tokens: template, only in the chat template's own text, or anywhere,"
        " also in messages and tools.",
    )
    default_max_tokens = serializers.IntegerField(
        required=False, allow_null=True, max_value=_MAX_INT, help_text="Of a response whose request sets no limit."
    )
    sampling_defaults = serializers.CharField(
        required=False,
        max_length=MAX_CHARACTERS,
        help_text="Sampling parameters of requests that do not set them: auto (those of the checkpoint), none, or"
        " values such as temperature=0.6,top_p=0.95.",
    )
    truncate_inputs = serializers.BooleanField(
        required=False,
        help_text="Whether inputs of an embedding model or cross-encoder above its length are truncated, unless a"
        " request says otherwise. If not, they are refused.",
    )
    pools = serializers.DictField(
        child=serializers.IntegerField(min_value=0, max_value=MAX_DEPLOYMENTS),
        required=False,
        help_text="Worker pool and number of replicas; 0: one on each of its workers.",
    )
    idle_seconds = serializers.IntegerField(
        required=False, max_value=_MAX_INT, help_text="Unload after this time without requests; 0: never."
    )
    engine = serializers.ChoiceField(
        value_checks.ENGINES,
        required=False,
        help_text="millrace loads the model; openai and anthropic call an upstream; managed starts a command.",
    )
    upstream_model = serializers.CharField(
        required=False, allow_blank=True, max_length=256, help_text="The model's name at the upstream."
    )
    preset = serializers.CharField(
        required=False, allow_blank=True, max_length=32, help_text="Known upstream, such as openai, groq or vllm."
    )
    credential_id = serializers.IntegerField(
        required=False, allow_null=True, min_value=1, max_value=MAX_BIGINT, help_text="Of the platform's credentials."
    )
    allow_internal = serializers.BooleanField(
        required=False, help_text="Whether the base URL may have internal addresses and plain http."
    )
    concurrency = serializers.IntegerField(
        required=False, max_value=_MAX_INT, help_text="Concurrent requests of a replica to the upstream."
    )
    command = serializers.CharField(
        required=False,
        allow_blank=True,
        max_length=value_checks.MAX_COMMAND_LENGTH,
        help_text="Starts a managed engine, such as `vllm serve {model} --port {port}`.",
    )
    images = serializers.BooleanField(required=False, help_text="Whether the upstream's model reads images.")
    tools = serializers.BooleanField(required=False, help_text="Whether the upstream's model calls tools.")
    reasoning = serializers.BooleanField(required=False, help_text="Whether the upstream's model reasons.")
    task = serializers.ChoiceField(TASKS, required=False, help_text="Of the upstream's model.")
    dimensions = serializers.IntegerField(
        required=False, allow_null=True, max_value=_MAX_INT, help_text="Numbers of a vector, if the task is embed."
    )


class _SourceIn(DeploymentOptionsSerializer):
    source = serializers.CharField(  # type: ignore[assignment]
        required=False, max_length=1024, help_text="embedded, a model directory or a .gguf file."
    )
    base_url = serializers.CharField(
        required=False, max_length=1024, help_text="Of an upstream; default: the preset's, if it has one."
    )
    force = serializers.BooleanField(
        required=False,
        write_only=True,
        help_text="Accept a source that fails the check on this machine, if its workers can load it.",
    )

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        attrs = super().validate(attrs)
        if (url := attrs.pop("base_url", None)) is not None:  # stored as the source
            if "source" in attrs:
                raise serializers.ValidationError({"base_url": ["Send the base URL or a source, not both."]})
            attrs["source"] = url
        return attrs


class DeploymentCreateSerializer(_SourceIn):
    name = serializers.CharField(max_length=64, help_text="The model name that requests use.")
    secret = serializers.CharField(
        required=False,
        write_only=True,
        trim_whitespace=False,
        max_length=MAX_SECRET_LENGTH,
        help_text="API key at the upstream. It is stored encrypted, as a credential with the deployment's name.",
    )


class DeploymentUpdateSerializer(_SourceIn):
    pass


class DeploymentImportCreateSerializer(StrictSerializer):
    deployments = serializers.ListField(child=serializers.DictField(), max_length=MAX_DEPLOYMENTS)

    def validate_deployments(self, value: list[Any]) -> list[dict[str, Any]]:
        return [dict(validate_body(DeploymentCreateSerializer, entry)) for entry in value]


class DeploymentCheckSerializer(serializers.Serializer[Any]):
    task = serializers.CharField(help_text="generate, embed or rerank.")
    unchecked = serializers.CharField(help_text=_UNCHECKED)


class DeploymentImportSerializer(serializers.Serializer[Any]):
    created = serializers.ListField(child=serializers.CharField())
    updated = serializers.ListField(child=serializers.CharField())
    unchanged = serializers.ListField(child=serializers.CharField())


class DeploymentReplicaSerializer(serializers.Serializer[Any]):
    """A replica in one worker."""

    id = serializers.CharField()
    worker = serializers.CharField()
    host = serializers.CharField(help_text="Name of the worker's machine; empty if it is unknown.")
    started_at = serializers.DateTimeField(allow_null=True, help_text="Start of the worker's process.")
    state = serializers.CharField(source="state.value")
    phase = serializers.CharField(source="beat.phase.value")
    version = serializers.CharField(source="beat.version")
    running = serializers.IntegerField(source="beat.running")
    waiting = serializers.IntegerField(source="beat.waiting")
    reason = serializers.CharField(source="beat.reason")
    loaded_bytes = serializers.IntegerField(source="beat.loaded_bytes")
    total_bytes = serializers.IntegerField(source="beat.total_bytes")
    load_ms = serializers.IntegerField(source="beat.load_ms")


class OfferedPriceSerializer(serializers.Serializer[NewPrice]):
    """A price to start from, per million tokens."""

    tier = serializers.CharField()
    component = serializers.CharField()
    usd_per_million = serializers.SerializerMethodField()

    def get_usd_per_million(self, price: NewPrice) -> str:
        return decimal(price.nano_per_million, NANO_DIGITS, 2)


class DeploymentSerializer(serializers.Serializer[DeploymentStatus]):
    """A deployment with its state."""

    name = serializers.CharField(source="deployment.name")
    source = serializers.CharField(source="deployment.source")  # type: ignore[assignment]
    revision = serializers.CharField(source="deployment.revision")
    version = serializers.CharField(help_text="Identifies what a replica loads.")
    dtype = serializers.CharField(source="deployment.dtype")
    quantization = serializers.CharField(source="deployment.quantization")
    kv_cache_dtype = serializers.CharField(source="deployment.kv_cache_dtype")
    max_model_len = serializers.IntegerField(source="deployment.max_model_len", allow_null=True)
    kv_cache_memory = serializers.CharField(source="deployment.kv_cache_memory")
    block_size = serializers.IntegerField(source="deployment.block_size", allow_null=True)
    speculation = serializers.CharField(source="deployment.speculation")
    draft_model = serializers.CharField(source="deployment.draft_model")
    tool_parser = serializers.CharField(source="deployment.tool_parser")
    reasoning_parser = serializers.CharField(source="deployment.reasoning_parser")
    control_tokens = serializers.CharField(source="deployment.control_tokens")
    default_max_tokens = serializers.IntegerField(source="deployment.default_max_tokens", allow_null=True)
    sampling_defaults = serializers.CharField(source="deployment.sampling_defaults")
    truncate_inputs = serializers.BooleanField(source="deployment.truncate_inputs")
    pools = serializers.DictField(source="deployment.pools", child=serializers.IntegerField())
    idle_seconds = serializers.IntegerField(source="deployment.idle_seconds")
    engine = serializers.CharField(source="deployment.engine")
    upstream_model = serializers.CharField(source="deployment.upstream_model")
    preset = serializers.CharField(source="deployment.preset")
    credential_id = serializers.IntegerField(source="deployment.credential_id", allow_null=True)
    allow_internal = serializers.BooleanField(source="deployment.allow_internal")
    concurrency = serializers.IntegerField(source="deployment.concurrency")
    command = serializers.CharField(source="deployment.command")
    images = serializers.BooleanField(source="deployment.images")
    tools = serializers.BooleanField(source="deployment.tools")
    reasoning = serializers.BooleanField(source="deployment.reasoning")
    task = serializers.CharField(source="deployment.task")
    dimensions = serializers.IntegerField(source="deployment.dimensions", allow_null=True)
    wanted_state = serializers.ChoiceField(
        WANTED_STATES, source="deployment.state", help_text="The state that operators want."
    )
    state = serializers.ChoiceField(DEPLOYMENT_STATES, help_text="The present state.")
    reason = serializers.CharField(help_text="Why a replica or a gateway could not load the model.")
    progress_percent = serializers.IntegerField(allow_null=True, help_text="Of a load.")
    ready_replicas = serializers.IntegerField(source="ready")
    wanted_replicas = serializers.IntegerField(source="wanted", allow_null=True, help_text="null: one on each worker.")
    replicas = DeploymentReplicaSerializer(many=True)
    unchecked = serializers.SerializerMethodField(help_text=f"After a change: {_UNCHECKED}")
    has_price = serializers.SerializerMethodField(help_text="Without a list price, requests get 503.")
    offered_price = serializers.SerializerMethodField(help_text="Prices to start from; empty if it has a price.")

    def get_has_price(self, status: DeploymentStatus) -> bool:
        return status.deployment.name not in self.context["unpriced"]

    def get_unchecked(self, status: DeploymentStatus) -> str:
        return str(self.context.get("unchecked", ""))

    @extend_schema_field(OfferedPriceSerializer(many=True))
    def get_offered_price(self, status: DeploymentStatus) -> Any:
        offered = self.context["offers"].get(status.deployment.name, ())
        standard: Any = [price for price in offered if price.tier == Tier.STANDARD]
        return OfferedPriceSerializer(standard, many=True).data


class PriceDraftSerializer(serializers.Serializer[PriceVersion]):
    """A draft of the offered price."""

    id = serializers.IntegerField(help_text="Of the draft, for POST /api/operator/prices/{id}/publish.")
    note = serializers.CharField()


class _DeploymentView(OperatorView):
    serializer_class = DeploymentSerializer
    pagination_class = None

    def answer(self, rows: list[Deployment], *, many: bool, status: int = 200, is_changed: bool = False) -> Response:
        board = deployment_checks.read_board()
        unchecked = deployment_checks.check_workers(rows[0], board) if is_changed else ""
        with self.scope():
            unpriced = offered_prices.unpriced_names(row.name for row in rows)
            offers = {row.name: offered_prices.offered_price(row).prices for row in rows if row.name in unpriced}
        found: Any = [deployment_status(row, board) for row in rows]
        out = DeploymentSerializer(
            found if many else found[0],
            many=many,
            context={"unpriced": unpriced, "offers": offers, "unchecked": unchecked},
        )
        return Response(out.data, status=status)

    def find_deployment(self, name: str) -> Deployment:
        with self.scope():
            return find_first(Deployment.objects.filter(name=name))


class ServedModels(OperatorView):
    pagination_class = None

    @extend_schema(operation_id="operator_models", responses=ServedModelSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return the models this platform serves."""
        board = deployment_checks.read_board()
        rows: Any = [
            {"name": spec.name, "origin": spec.source, "workers": 0 if board is None else board.count_ready(spec.name)}
            for spec in served_deployments.served_specs()
        ]
        return Response(ServedModelSerializer(rows, many=True).data)


class Deployments(_DeploymentView):
    @extend_schema(operation_id="operator_deployments", responses=DeploymentSerializer(many=True))
    def get(self, request: Request) -> Response:
        """Return all deployments with their states."""
        with self.scope():
            rows = list(Deployment.objects.all())
        return self.answer(rows, many=True)

    @extend_schema(
        operation_id="operator_deployments_create",
        request=DeploymentCreateSerializer,
        responses={201: DeploymentSerializer},
    )
    @idempotent
    def post(self, request: Request) -> Response:
        """Add a deployment. Workers of its pools load it. A source that cannot be loaded is refused, unless forced."""
        fields = validate_body(DeploymentCreateSerializer, request.data)
        deployment_checks.check_new_source(fields)
        return self.answer([deployments.do_add_deployment(**fields)], many=False, status=201, is_changed=True)


class DeploymentCheck(_DeploymentView):
    @extend_schema(
        operation_id="operator_deployments_check",
        request=DeploymentCreateSerializer,
        responses=DeploymentCheckSerializer,
    )
    @idempotent
    def post(self, request: Request) -> Response:
        """Check a deployment's values and its source without adding it."""
        fields = validate_body(DeploymentCreateSerializer, request.data)
        found: Any = deployment_checks.check_deployment(**fields)
        return Response(DeploymentCheckSerializer(found).data)


class DeploymentImport(_DeploymentView):
    @extend_schema(
        operation_id="operator_deployments_import",
        request=DeploymentImportCreateSerializer,
        responses=DeploymentImportSerializer,
    )
    @idempotent
    def post(self, request: Request) -> Response:
        """Create or update deployments. Others stay as they are; the same call again changes nothing."""
        entries = validate_body(DeploymentImportCreateSerializer, request.data)["deployments"]
        deployment_checks.check_new_sources(entries)
        return Response(DeploymentImportSerializer(deployments.do_import_deployments(entries)).data)


class DeploymentOne(_DeploymentView):
    @extend_schema(operation_id="operator_deployment")
    def get(self, request: Request, name: str) -> Response:
        """Return a deployment with its state."""
        return self.answer([self.find_deployment(name)], many=False)

    @extend_schema(operation_id="operator_deployment_update", request=DeploymentUpdateSerializer)
    def patch(self, request: Request, name: str) -> Response:
        """Change a deployment. A new version is loaded beside the old one, which serves until then."""
        self.find_deployment(name)
        changes = validate_body(DeploymentUpdateSerializer, request.data, partial=True)
        deployment_checks.check_changed_source(name, changes)
        return self.answer([deployments.do_update_deployment(name, **changes)], many=False, is_changed=True)

    @extend_schema(operation_id="operator_deployment_remove", responses={204: None})
    def delete(self, request: Request, name: str) -> Response:
        """Remove a deployment after its running streams have ended."""
        self.find_deployment(name)
        deployments.do_remove_deployment(name)
        return Response(status=204)


class DeploymentAction(_DeploymentView):
    action_name: ClassVar[str] = ""
    action_texts: ClassVar[dict[str, str]] = {
        "load": "Load the deployment, or accept requests again after a drain.",
        "drain": "Accept no more requests. Running streams end, and the weights stay loaded.",
        "unload": "Drain the deployment, then drop its weights.",
    }

    @extend_schema(request=None, responses=DeploymentSerializer)
    @idempotent
    def post(self, request: Request, name: str) -> Response:
        self.find_deployment(name)
        return self.answer([deployments.do_set_deployment_state(name, STATES[self.action_name])], many=False)


class DeploymentPrice(_DeploymentView):
    @extend_schema(operation_id="operator_deployment_draft_price", request=None, responses={201: PriceDraftSerializer})
    @idempotent
    def post(self, request: Request, name: str) -> Response:
        """Draft the offered price of a deployment without one, for another operator to publish."""
        self.find_deployment(name)
        version = offered_prices.do_draft_offered_price(name, by=person(request))
        return Response(PriceDraftSerializer(version).data, status=201)
