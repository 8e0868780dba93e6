"""The plan of an import from LiteLLM: what maps, what does not, and that no secret is shown."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from millrace.cli.litellm_plan import Database, PlannedBudget, make_plan

CONFIG = yaml.safe_load("""
model_list:
  - model_name: gpt-4o
    litellm_params: {model: openai/gpt-4o, api_key: os.environ/OPENAI_API_KEY, rpm: 100, max_parallel_requests: 32}
    model_info: {max_input_tokens: 128000, max_output_tokens: 16384, supports_vision: true, input_cost_per_token: 2e-6}
  - model_name: gpt-4o
    litellm_params: {model: azure/gpt-4o-eu, api_base: "https://eu.openai.azure.com/", api_key: os.environ/AZURE_KEY}
  - model_name: Claude
    litellm_params: {model: claude-sonnet-4, api_key: sk-ant-in-the-file}
  - model_name: mini
    litellm_params: {model: openai/gpt-4o-mini, api_key: os.environ/OPENAI_API_KEY}
  - model_name: own
    litellm_params: {model: hosted_vllm/org/model, api_base: "http://vllm:8000/v1"}
  - model_name: titan
    litellm_params: {model: bedrock/amazon.titan}
  - model_name: openai/*
    litellm_params: {model: openai/*}
  - model_name: vectors
    litellm_params: {model: openai/text-embedding-3-small}
    model_info: {mode: embedding}
  - model_name: proxied
    litellm_params: {model: openai/x, api_base: "https://llm.example.com/v1", litellm_credential_name: shared}
credential_list:
  - {credential_name: shared, credential_values: {api_key: os.environ/SHARED_KEY}}
router_settings:
  fallbacks: [{mini: [Claude, titan]}]
  model_group_alias: {fast: mini}
  routing_strategy: least-busy
litellm_settings: {drop_params: true}
general_settings: {master_key: sk-master-key}
""")
NOW = datetime(2026, 11, 1, tzinfo=UTC)
DATABASE = Database(
    organizations=[{"organization_id": "o1", "organization_alias": "Acme Inc.", "budget_id": "b1"}],
    teams=[
        {"team_id": "t1", "team_alias": "Search", "organization_id": "o1", "models": ["gpt-4o"], "rpm_limit": 60},
        {"team_id": "t2", "team_alias": "Acme Inc", "max_budget": 12.5, "budget_duration": "1d", "models": []},
        {"team_id": "t3", "team_alias": "Old", "blocked": True},
    ],
    keys=[
        {"token": "a" * 64, "key_name": "sk-...abcd", "key_alias": "ci", "team_id": "t1", "models": []},
        {
            "token": "b" * 64,
            "key_name": "sk-...efgh",
            "team_id": "t2",
            "models": ["mini", "titan"],
            "max_budget": 0.1,
            "expires": "2027-01-01T00:00:00",
        },
        {"token": "c" * 64, "key_alias": "late", "team_id": "t1", "expires": "2026-01-01T00:00:00"},
        {"token": "d" * 64, "key_alias": "of nobody"},
        {"token": "e" * 64, "key_alias": "of old", "team_id": "t3"},
        {"token": "f" * 64, "key_alias": "weekly", "team_id": "t1", "max_budget": 5, "budget_duration": "7d"},
    ],
    budgets=[{"budget_id": "b1", "max_budget": 1000, "budget_duration": "30d", "tpm_limit": 5000}],
    models=[{"model_name": "stored"}],
)


def test_what_maps() -> None:
    plan = make_plan(CONFIG, DATABASE, now=NOW)
    assert [each.name for each in plan.deployments] == ["gpt-4o", "gpt-4o-2", "claude", "mini", "proxied"]
    first, azure, claude, mini, proxied = plan.deployments
    assert first.options == {
        "engine": "openai",
        "upstream_model": "gpt-4o",
        "preset": "openai",
        "max_model_len": 144_384,
        "concurrency": 32,
        "images": True,
    }
    assert (azure.options["preset"], azure.options["base_url"]) == ("azure", "https://eu.openai.azure.com/openai/v1")
    assert (claude.options["engine"], claude.options["upstream_model"]) == ("anthropic", "claude-sonnet-4")
    assert (proxied.options.get("preset"), proxied.options["base_url"]) == (None, "https://llm.example.com/v1")
    assert (first.credential, mini.credential, claude.credential) == ("openai_api_key", "openai_api_key", "claude")
    assert [(each.name, each.variable) for each in plan.credentials] == [
        ("openai_api_key", "OPENAI_API_KEY"),
        ("azure_key", "AZURE_KEY"),
        ("claude", ""),
        ("shared_key", "SHARED_KEY"),
    ]
    fallback = ["mini", "claude"]
    assert plan.policies == {"gpt-4o": ["gpt-4o", "gpt-4o-2"], "mini": fallback, "fast": fallback}
    assert [(each.slug, each.budget) for each in plan.tenants] == [
        ("acme-inc", PlannedBudget("LiteLLM: organization Acme Inc.", 1000 * 10**9, "month")),
        ("acme-inc-2", PlannedBudget("LiteLLM: team Acme Inc", 12_500_000_000, "day")),
    ]
    assert plan.tenants[0].limits == {"tokens_per_minute": 5000}
    (search,) = plan.projects["acme-inc"]
    assert (search.slug, search.limits) == ("search", {"requests_per_minute": 60})
    keys = {each.name: each for each in plan.keys}
    assert (keys["ci"].tenant, keys["ci"].project, keys["ci"].allowed_models) == (
        "acme-inc",
        "search",
        ("gpt-4o", "gpt-4o-2"),
    )
    second = keys["sk-...efgh"]
    assert (second.tenant, second.project, second.allowed_models) == ("acme-inc-2", "default", ("mini",))
    assert (second.expires_at, second.budget) == (
        "2027-01-01T00:00:00+00:00",
        PlannedBudget("LiteLLM: key sk-...efgh", 100_000_000, "lifetime"),
    )
    assert keys["weekly"].budget is None


def test_what_does_not_map_is_listed_without_secrets() -> None:
    plan = make_plan(CONFIG, DATABASE, now=NOW)
    text = "\n".join(f"{each.subject}: {each.reason}" for each in plan.unmapped)
    for part in (
        "model titan: the provider bedrock",
        "model openai/*: wildcards",
        "model vectors: the mode embedding",
        "model own: its address is internal",
        "model gpt-4o: not imported: rpm",
        "model Claude: its api_key is in the file",
        "fallback mini to titan",
        "router_settings: not imported: routing_strategy",
        "general_settings: not imported: master_key",
        "model stored: stored encrypted",
        "team Old: it is blocked",
        "key late: it has expired",
        "key of nobody: it has no team",
        "key of old: its team was not imported",
        "key weekly: its budget of 5 USD per 7d",
        "organization Acme Inc.: its budget of 30d is one of a calendar month",
        "key sk-...efgh: its model titan",
    ):
        assert part in text
    for secret in ("sk-ant-in-the-file", "sk-master-key"):
        assert secret not in text
        assert secret not in repr(plan)
    allowed = make_plan(CONFIG, DATABASE, allow_internal=True, default_tenant="rest", now=NOW)
    assert next(each for each in allowed.deployments if each.name == "own").options["allow_internal"] is True
    assert {each.slug for each in allowed.tenants} == {"acme-inc", "acme-inc-2", "rest"}
    assert next(each for each in allowed.keys if each.name == "of nobody").tenant == "rest"


@pytest.mark.parametrize("host", ["10.0.0.1", "192.0.0.100", "[64:ff9b::a00:1]", "[2002:a00:1::]", "[::ffff:10.0.0.1]"])
def test_models_at_internal_addresses_need_permission(host: str) -> None:
    models = [{"model_name": "own", "litellm_params": {"model": "openai/x", "api_base": f"https://{host}/v1"}}]
    plan = make_plan({"model_list": models}, Database(), now=NOW)
    assert ["internal" in each.reason for each in plan.unmapped if each.subject == "model own"] == [True]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_list": None},
        {"model_list": [1, {}, {"model_name": "x"}, {"model_name": None, "litellm_params": None}]},
        {"router_settings": {"fallbacks": [{"x": None}], "model_group_alias": {"a": {"model": []}}}},
        {"litellm_settings": [1], "general_settings": None},
    ],
)
def test_incomplete_configurations_are_no_error(config: dict[str, Any]) -> None:
    assert make_plan(config, Database(keys=[{}], teams=[{}], organizations=[{}])).deployments == []
