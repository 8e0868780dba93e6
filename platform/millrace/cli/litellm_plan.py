"""The plan of an import from LiteLLM: the objects of its configuration and database, and the unmapped parts.

The plan depends only on the files and rows that were read. `litellm_import` reads them and executes the plan.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from inference_worker.contract.command_line import format_command
from inference_worker.contract.ip_addresses import is_public_text

ENV_PREFIX = "os.environ/"
MAX_NAME_LENGTH = 64
MAX_SLUG_LENGTH = 50
NANO_PER_USD = 1_000_000_000
Period = Literal["day", "month", "lifetime"]
# LiteLLM's prefix of a model -> engine and preset of a deployment.
PROVIDERS: Mapping[str, tuple[str, str]] = {
    "anthropic": ("anthropic", "anthropic"),
    "azure": ("openai", "azure"),
    "custom_openai": ("openai", ""),
    "gemini": ("openai", "google"),
    "groq": ("openai", "groq"),
    "hosted_vllm": ("openai", "vllm"),
    "litellm_proxy": ("openai", "litellm"),
    "llamafile": ("openai", "llamacpp"),
    "mistral": ("openai", "mistral"),
    "ollama": ("openai", "ollama"),
    "ollama_chat": ("openai", "ollama"),
    "openai": ("openai", "openai"),
    "openrouter": ("openai", "openrouter"),
    "together_ai": ("openai", "together"),
    "vllm": ("openai", "vllm"),
}
_ALL_MODELS = {"all-proxy-models", "all-team-models", "*"}
_PERIODS: Mapping[str, Period] = {"1d": "day", "24h": "day", "1mo": "month", "30d": "month", "31d": "month"}
_LIMITS = {
    "tpm_limit": "tokens_per_minute",
    "rpm_limit": "requests_per_minute",
    "max_parallel_requests": "concurrency",
}


class Unmapped(NamedTuple):
    """A part of the configuration or the database that is not imported."""

    subject: str
    reason: str


@dataclass(frozen=True)
class PlannedCredential:
    """A credential of the platform. Its secret is in an environment variable, or in the configuration."""

    name: str
    variable: str = ""
    literal: str = field(default="", repr=False)


@dataclass(frozen=True)
class PlannedDeployment:
    name: str
    options: Mapping[str, Any]  # options of the API
    credential: str = ""  # the name of a planned credential


@dataclass(frozen=True)
class PlannedBudget:
    name: str
    amount_nano: int
    period: Period


@dataclass(frozen=True)
class PlannedScope:
    """A tenant or a project, with its limits and budget."""

    slug: str
    name: str
    limits: Mapping[str, int] = field(default_factory=dict)
    budget: PlannedBudget | None = None


@dataclass(frozen=True)
class PlannedKey:
    """A new key in place of one of LiteLLM, whose secret is unknown: its database has only a hash."""

    token: str  # LiteLLM's hash
    old_name: str  # LiteLLM's abbreviated key
    name: str
    tenant: str
    project: str
    allowed_models: tuple[str, ...] | None
    expires_at: str | None
    limits: Mapping[str, int]
    budget: PlannedBudget | None


@dataclass
class Plan:
    """The objects that an import creates. All names are unique, so it can be executed again."""

    credentials: list[PlannedCredential] = field(default_factory=list)
    deployments: list[PlannedDeployment] = field(default_factory=list)
    policies: dict[str, list[str]] = field(default_factory=dict)  # policies of every imported tenant
    tenants: list[PlannedScope] = field(default_factory=list)
    projects: dict[str, list[PlannedScope]] = field(default_factory=dict)  # tenant's slug -> its projects
    keys: list[PlannedKey] = field(default_factory=list)
    unmapped: list[Unmapped] = field(default_factory=list)


class Database(NamedTuple):
    """The rows of LiteLLM's database, as JSON objects."""

    organizations: Sequence[Mapping[str, Any]] = ()
    teams: Sequence[Mapping[str, Any]] = ()
    keys: Sequence[Mapping[str, Any]] = ()
    budgets: Sequence[Mapping[str, Any]] = ()
    models: Sequence[Mapping[str, Any]] = ()


def make_plan(
    config: Mapping[str, Any],
    database: Database,
    *,
    allow_internal: bool = False,
    default_tenant: str = "",
    now: datetime | None = None,
) -> Plan:
    """Return the plan of an import.

    Args:
        allow_internal: import models at internal addresses.
        default_tenant: the slug of the tenant that gets the keys without a team.
    """
    plan = Plan()
    names = _plan_models(plan, config, allow_internal)
    _plan_policies(plan, config, names)
    _plan_settings(plan, config)
    for row in database.models:
        plan.unmapped.append(Unmapped(f"model {row.get('model_name')}", "stored encrypted in the database; add it"))
    _plan_scopes(plan, database, names, default_tenant, now or datetime.now(UTC))
    return plan


# Models.


def _plan_models(plan: Plan, config: Mapping[str, Any], allow_internal: bool) -> dict[str, list[str]]:
    """Plan credentials and deployments. Return the deployments of each model name of LiteLLM."""
    shared = {
        str(row.get("credential_name")): dict(row.get("credential_values") or {})
        for row in _mappings(config.get("credential_list"))
    }
    names: dict[str, list[str]] = {}
    taken: set[str] = set()
    for row in _mappings(config.get("model_list")):
        old_name = str(row.get("model_name") or "")
        params = dict(row.get("litellm_params") or {})
        params = shared.get(str(params.pop("litellm_credential_name", "")), {}) | params
        subject = f"model {old_name}"
        options = _upstream_options(plan, subject, params, dict(row.get("model_info") or {}), allow_internal)
        if options is None:
            continue
        name = _free_name(_model_name(old_name), taken, MAX_NAME_LENGTH)
        if name != old_name and old_name not in names:
            plan.unmapped.append(Unmapped(subject, f"the name is not allowed; its deployment is {name}"))
        credential = _plan_credential(plan, subject, name, str(params.get("api_key") or ""))
        plan.deployments.append(PlannedDeployment(name, options, credential))
        names.setdefault(old_name, []).append(name)
    return names


def _upstream_options(
    plan: Plan, subject: str, params: Mapping[str, Any], info: Mapping[str, Any], allow_internal: bool
) -> dict[str, Any] | None:
    """Return the options of the deployment; None if the model cannot be imported."""
    model = str(params.get("model") or "")
    provider, slash, upstream_model = model.partition("/")
    if not slash or str(params.get("custom_llm_provider") or "") in PROVIDERS:
        given = str(params.get("custom_llm_provider") or "")
        provider, upstream_model = given or _guess_provider(model), model
    reason = ""
    if "*" in model or "*" in subject:
        reason = "wildcards have no counterpart; add each model"
    elif provider not in PROVIDERS:
        reason = f"the provider {provider or 'of ' + repr(model)} is not supported"
    elif (mode := str(info.get("mode") or "chat")) not in ("chat", "completion", "responses"):
        reason = f"the mode {mode} is not imported; add it with `{format_command('deployments add --task')}`"
    if reason:
        plan.unmapped.append(Unmapped(subject, reason))
        return None
    engine, preset = PROVIDERS[provider]
    url = str(params.get("api_base") or params.get("base_url") or "").rstrip("/")
    if url.startswith(ENV_PREFIX):
        plan.unmapped.append(Unmapped(subject, f"its api_base is in {url}; write the URL into the file"))
        return None
    if preset == "openai" and url and urlsplit(url).hostname != "api.openai.com":
        preset = ""  # another server of the same protocol
    url = _base_url(preset, url)
    options: dict[str, Any] = {"engine": engine, "upstream_model": upstream_model}
    if preset:
        options["preset"] = preset
    if url:
        options["base_url"] = url
    if _is_internal(url) or (preset == "ollama" and not url):
        if not allow_internal:
            plan.unmapped.append(Unmapped(subject, "its address is internal or not https; use --allow-internal"))
            return None
        options["allow_internal"] = True
    if tokens := _positive(info.get("max_input_tokens")):
        options["max_model_len"] = tokens + (_positive(info.get("max_output_tokens")) or 0)
    if concurrency := _positive(params.get("max_parallel_requests")):
        options["concurrency"] = concurrency
    for old, new in (("vision", "images"), ("function_calling", "tools"), ("reasoning", "reasoning")):
        if isinstance(info.get(f"supports_{old}"), bool):
            options[new] = info[f"supports_{old}"]
    ignored = sorted({"rpm", "tpm", "timeout", "stream_timeout", "max_budget", "weight", "order"} & set(params))
    if ignored:
        plan.unmapped.append(Unmapped(subject, f"not imported: {', '.join(ignored)}"))
    if any(name.endswith("_cost_per_token") for name in (*info, *params)):
        plan.unmapped.append(Unmapped(subject, f"its cost is not imported; see `{format_command('costs import')}`"))
    return options


def _base_url(preset: str, url: str) -> str:
    """Return the base URL with its version, which LiteLLM adds for some providers."""
    if preset == "azure" and url and not url.endswith("/openai/v1"):
        return f"{url.removesuffix('/openai')}/openai/v1"
    if preset in ("anthropic", "ollama") and url and not url.endswith("/v1"):
        return f"{url}/v1"
    return url


def _guess_provider(model: str) -> str:
    if re.match(r"(gpt-|chatgpt-|o\d)", model):
        return "openai"
    return "anthropic" if model.startswith("claude-") else ""


def _is_internal(url: str) -> bool:
    """Return whether the URL needs permission for internal addresses, without resolving its host."""
    if not url:
        return False
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        is_private = not is_public_text(host)
    except ValueError:
        is_private = host == "localhost" or host.endswith((".local", ".internal", ".localhost")) or "." not in host
    return is_private or parts.scheme != "https"


def _plan_credential(plan: Plan, subject: str, deployment: str, api_key: str) -> str:
    """Plan the credential of a model once. Return its name; empty without one."""
    if not api_key:
        return ""
    if not api_key.startswith(ENV_PREFIX):
        known = next((each.name for each in plan.credentials if each.literal == api_key), None)
        if known is None:
            plan.credentials.append(PlannedCredential(deployment, literal=api_key))
            plan.unmapped.append(Unmapped(subject, "its api_key is in the file; rotate it after the import"))
        return known or deployment
    variable = api_key.removeprefix(ENV_PREFIX)
    known = next((each.name for each in plan.credentials if each.variable == variable), None)
    if known is None:
        known = _free_name(_model_name(variable), {each.name for each in plan.credentials}, MAX_NAME_LENGTH)
        plan.credentials.append(PlannedCredential(known, variable=variable))
    return known


# Policies and settings.


def _plan_policies(plan: Plan, config: Mapping[str, Any], names: Mapping[str, Sequence[str]]) -> None:
    """Plan a policy for each model with several deployments, a fallback or an alias."""
    router, general = _section(config, "router_settings"), _section(config, "litellm_settings")
    targets = {name: list(deployments) for name, deployments in names.items()}
    for row in (*_mappings(router.get("fallbacks")), *_mappings(general.get("fallbacks"))):
        for name, fallbacks in row.items():
            if name not in targets:
                plan.unmapped.append(Unmapped(f"fallbacks of {name}", "the model was not imported"))
                continue
            for fallback in _texts(fallbacks):
                targets[name] += [each for each in names.get(fallback, ()) if each not in targets[name]]
                if fallback not in names:
                    plan.unmapped.append(Unmapped(f"fallback {name} to {fallback}", "the model was not imported"))
    for name, deployments in targets.items():
        if len(deployments) > 1:
            plan.policies[_model_name(name)] = deployments
    for alias, target in _section(router, "model_group_alias").items():
        name = str(target.get("model") if isinstance(target, Mapping) else target)
        if name in targets:
            plan.policies[_model_name(str(alias))] = targets[name]
        else:
            plan.unmapped.append(Unmapped(f"alias {alias}", "its model was not imported"))


def _plan_settings(plan: Plan, config: Mapping[str, Any]) -> None:
    """List the settings that are not imported."""
    known = {"model_list", "credential_list"}
    imported = {"router_settings": {"fallbacks", "model_group_alias"}, "litellm_settings": {"fallbacks"}}
    for section, value in config.items():
        if section in known:
            continue
        if not isinstance(value, Mapping):
            plan.unmapped.append(Unmapped(str(section), "not imported"))
            continue
        rest = sorted(set(map(str, value)) - imported.get(section, set()))
        if rest:
            plan.unmapped.append(Unmapped(str(section), f"not imported: {', '.join(rest)}"))


# Teams, keys and budgets.


def _plan_scopes(
    plan: Plan, database: Database, names: Mapping[str, Sequence[str]], default_tenant: str, now: datetime
) -> None:
    budgets = {str(row.get("budget_id")): row for row in database.budgets}
    slugs: set[str] = set()
    tenants: dict[str, str] = {}  # organization -> slug of its tenant
    places: dict[str, tuple[str, str]] = {}  # team -> slugs of its tenant and project
    models: dict[str, list[str]] = {}
    for row in database.organizations:
        title = str(row.get("organization_alias") or row.get("organization_id"))
        scope = _scope(plan, row, "organization", title, _slug(title, slugs), budgets)
        plan.tenants.append(scope)
        tenants[str(row.get("organization_id"))] = scope.slug
    for row in database.teams:
        team, title = str(row.get("team_id")), str(row.get("team_alias") or row.get("team_id"))
        if row.get("blocked"):
            plan.unmapped.append(Unmapped(f"team {title}", "it is blocked"))
            continue
        models[team] = _texts(row.get("models"))
        organization = tenants.get(str(row.get("organization_id")))
        if organization is None:  # without an organization, the team is a tenant
            scope = _scope(plan, row, "team", title, _slug(title, slugs), budgets)
            plan.tenants.append(scope)
            places[team] = (scope.slug, "default")
        else:
            siblings = plan.projects.setdefault(organization, [])
            slug = _slug(title, {"default", *(each.slug for each in siblings)})
            siblings.append(_scope(plan, row, "team", title, slug, budgets))
            places[team] = (organization, slug)
        if row.get("members_with_roles"):
            plan.unmapped.append(Unmapped(f"team {title}", "its members are not imported; invite them"))
    if default_tenant and default_tenant not in slugs:
        plan.tenants.append(PlannedScope(default_tenant, default_tenant))
    for row in database.keys:
        _plan_key(plan, row, budgets, names, places, models, default_tenant, now)


def _plan_key(
    plan: Plan,
    row: Mapping[str, Any],
    budgets: Mapping[str, Mapping[str, Any]],
    names: Mapping[str, Sequence[str]],
    places: Mapping[str, tuple[str, str]],
    models: Mapping[str, Sequence[str]],
    default_tenant: str,
    now: datetime,
) -> None:
    token, team = str(row.get("token") or ""), str(row.get("team_id") or "")
    old_name = str(row.get("key_name") or token[:8])
    name = str(row.get("key_alias") or old_name)[:200]
    subject = f"key {name}"
    place = places.get(team) or ((default_tenant, "default") if default_tenant and not team else None)
    expires_at = _time(row.get("expires"))
    reason = ""
    if row.get("blocked"):
        reason = "it is blocked"
    elif expires_at is not None and expires_at <= now:
        reason = "it has expired"
    elif place is None:
        reason = "its team was not imported" if team else "it has no team; use --default-tenant"
    if reason or place is None:
        plan.unmapped.append(Unmapped(subject, reason))
        return
    given = _texts(row.get("models"))
    wanted = list(models.get(team, ())) if not given or "all-team-models" in given else given
    allowed = None if not wanted or _ALL_MODELS & set(wanted) else _find_allowed(plan, subject, wanted, names)
    scope = _scope(plan, row, "key", name, "", budgets)
    plan.keys.append(
        PlannedKey(
            token,
            old_name,
            name,
            *place,
            allowed_models=allowed,
            expires_at=None if expires_at is None else expires_at.isoformat(),
            limits=scope.limits,
            budget=scope.budget,
        )
    )


def _find_allowed(
    plan: Plan, subject: str, wanted: Iterable[str], names: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """Return the names that a key may request: its models' deployments, and the policies of the same names."""
    allowed: dict[str, None] = {}
    for model in wanted:
        if model not in names:
            plan.unmapped.append(Unmapped(subject, f"its model {model} was not imported"))
        allowed.update(dict.fromkeys((_model_name(model), *names.get(model, ())) if model in names else ()))
    return tuple(allowed)


def _scope(
    plan: Plan,
    row: Mapping[str, Any],
    kind: str,
    title: str,
    slug: str,
    budgets: Mapping[str, Mapping[str, Any]],
) -> PlannedScope:
    """Return the limits and the budget of a row. Its own values override those of its budget row."""
    shared = budgets.get(str(row.get("budget_id")), {})
    names = (*_LIMITS, "max_budget", "budget_duration", "model_max_budget")
    values = {name: row.get(name) if row.get(name) is not None else shared.get(name) for name in names}
    limits = {new: value for old, new in _LIMITS.items() if (value := _positive(values[old])) is not None}
    subject = f"{kind} {title}"
    if values["model_max_budget"]:
        plan.unmapped.append(Unmapped(subject, "budgets of single models are not imported"))
    return PlannedScope(slug, title[:200], limits, _budget(plan, subject, values))


def _budget(plan: Plan, subject: str, values: Mapping[str, Any]) -> PlannedBudget | None:
    if values["max_budget"] is None:
        return None
    try:
        amount = Decimal(str(values["max_budget"])) * NANO_PER_USD
        nano = int(amount.to_integral_value()) if amount.is_finite() else -1
    except InvalidOperation:
        nano = -1
    duration = values["budget_duration"]
    period: Period | None = "lifetime" if not duration else _PERIODS.get(str(duration))
    if nano <= 0 or period is None:
        text = f"{values['max_budget']} USD per {duration or 'lifetime'}"
        plan.unmapped.append(Unmapped(subject, f"its budget of {text} has no counterpart (day, month, lifetime)"))
        return None
    if str(duration) in ("30d", "31d"):
        plan.unmapped.append(Unmapped(subject, f"its budget of {duration} is one of a calendar month"))
    return PlannedBudget(f"LiteLLM: {subject}"[:100], nano, period)


# Values.


def _model_name(text: str) -> str:
    """Return the text as a name of a deployment."""
    name = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("._-")
    return name[:MAX_NAME_LENGTH] or "model"


def _slug(title: str, taken: set[str]) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:MAX_SLUG_LENGTH] or "team"
    return _free_name(slug, taken, MAX_SLUG_LENGTH)


def _free_name(name: str, taken: set[str], limit: int) -> str:
    """Return the name, with a number if it is taken, and mark it as taken."""
    found, number = name, 1
    while found in taken:
        number += 1
        suffix = f"-{number}"
        found = name[: limit - len(suffix)] + suffix
    taken.add(found)
    return found


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):  # JSON in a text column
        try:
            value = json.loads(value)
        except ValueError:
            return [value]
    return [str(each) for each in value] if isinstance(value, list) else []


def _positive(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number > 0 else None


def _time(value: Any) -> datetime | None:
    """Return a time of the database, which stores UTC without a time zone."""
    if value is None:
        return None
    found = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
