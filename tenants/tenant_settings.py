"""The settings of a tenant. Does not import Django.

A setting is declared here once. Its default and range become those of its column and of its constraint
(`tenants/models/tenancy.py`), the management API and the console's forms read the declaration, audit entries have its
words, and the snapshots of API keys contain its value if `ApiKeySnapshot` has a field of this name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inference_worker.contract.texts import Text

UNKNOWN_PARAMETERS = {"default": Text("platform's default"), "reject": Text("Reject"), "warn": Text("Warn")}
ANSWER_CACHE_SCOPES = {"tenant": Text("all projects"), "project": Text("keys of the same project")}


@dataclass(frozen=True)
class SettingGroup:
    """Settings that are changed together: in a form of the console, and with one audit entry."""

    name: str  # the audit entry is `tenant.<name>_updated`
    audit_verb: str  # in the audit log


CONTENT_RETENTION = SettingGroup("content_retention", Text("content retention updated"))
UNKNOWN_PARAMETER_HANDLING = SettingGroup("unknown_parameters", Text("unknown parameters updated"))
ALLOWED_ORIGINS = SettingGroup("allowed_origins", Text("allowed origins updated"))
ANSWER_CACHE = SettingGroup("answer_cache", Text("answer cache updated"))


@dataclass(frozen=True, kw_only=True)
class TenantSetting:
    """A setting, with its values and its texts.

    The console translates `label`, `hint`, `choices` and `audit_label`. A setting without a label is in no form.
    """

    name: str  # name of the column and of the field in the API
    group: SettingGroup
    default: Any
    maximum: int | None = None  # largest value of an integer; the smallest is 0
    choices: Mapping[str, str] | None = None  # value -> label
    max_items: int = 0  # items of a list; 0: the setting is no list
    max_length: int = 0  # characters of a list's item
    description: str  # text in the schema of the API's responses
    help: str  # text in the schema of the API's requests
    label: str = ""  # label in the console's form
    hint: str = ""  # below this field
    audit_label: str = ""  # in the audit log; empty: the name in words


SETTINGS: Mapping[str, TenantSetting] = {
    setting.name: setting
    for setting in (
        TenantSetting(
            name="content_retention_days",
            group=CONTENT_RETENTION,
            default=0,
            maximum=90,
            description="retention of prompts and completions; 0: not stored",
            help="Days for which prompts and completions are stored in the request log; 0: not stored.",
            label=Text("Days"),
            hint=Text("Enter 0 to turn prompt logging off and delete stored prompts."),
            audit_label=Text("Prompts stored for"),
        ),
        TenantSetting(
            name="unknown_parameters",
            group=UNKNOWN_PARAMETER_HANDLING,
            default="default",
            choices=UNKNOWN_PARAMETERS,
            description="whether unknown fields of requests are rejected, or dropped and named",
            help="Whether unknown fields of inference requests are rejected with a 400 (reject), or dropped and named"
            " in the header x-millrace-ignored (warn); default: the platform's setting.",
        ),
        TenantSetting(
            name="allowed_origins",
            group=ALLOWED_ORIGINS,
            default=(),
            max_items=20,
            max_length=200,
            description="origins of web pages that may call the API",
            help="Origins of web pages that may call /v1 with the tenant's keys, such as https://host; *: any.",
        ),
        TenantSetting(
            name="answer_cache_seconds",
            group=ANSWER_CACHE,
            default=0,
            maximum=30 * 86_400,
            description="lifetime of cached answers; 0: answers are not cached",
            help="Lifetime of cached answers in seconds; 0: answers are not cached.",
            label=Text("Hours"),
            hint=Text("Time for which answers are cached. Enter 0 to turn the cache off and delete cached answers."),
            audit_label=Text("Answers cached for"),
        ),
        TenantSetting(
            name="answer_cache_sampled",
            group=ANSWER_CACHE,
            default=False,
            description="whether answers with a temperature above 0 are cached too",
            help="Whether answers to requests with a temperature above 0 are cached too.",
            label=Text("Also cache answers to requests with a temperature above 0"),
            hint=Text("Equal requests then receive the same answer instead of a new sample."),
            audit_label=Text("Sampled answers cached"),
        ),
        TenantSetting(
            name="answer_cache_scope",
            group=ANSWER_CACHE,
            default="tenant",
            choices=ANSWER_CACHE_SCOPES,
            description="whether cached answers are shared by all projects, or only by the keys of a project",
            help="Whether cached answers are shared by all projects of the tenant (tenant), or only by the keys of a"
            " project (project).",
            label=Text("Cached answers are shared by"),
            hint=Text("Choose one project if projects must not receive each other's answers."),
            audit_label=Text("Cached answers shared by"),
        ),
        TenantSetting(
            name="semantic_cache_max_error_percent",
            group=ANSWER_CACHE,
            default=0,
            maximum=20,
            description="maximum error rate of answers to similar questions; 0: none are served",
            help="Maximum error rate in percent of cached answers to similar questions, for model names whose routing"
            " policy has semantic_cache; 0: none are served.",
            label=Text("Maximum error rate for similar questions (%%)"),
            hint=Text(
                "Applies to model names whose routing policy serves similar questions. Needs prompt logging. Enter 0"
                " to serve equal requests only."
            ),
        ),
        TenantSetting(
            name="cache_warming_nano",
            group=ANSWER_CACHE,
            default=0,
            maximum=10**15,  # a million USD
            description="budget of cache warming for each day, in nano-USD; 0: caches are not warmed",
            help="Budget of cache warming for each day (UTC), in nano-USD; 0: caches are not warmed.",
            label=Text("Daily budget for cache warming (USD)"),
            hint=Text(
                "Frequent prompts and shared prefixes are computed ahead in off-peak hours if that should save"
                " money. Needs prompt logging. Enter 0 to turn cache warming off."
            ),
        ),
    )
}
GROUPS: Mapping[SettingGroup, tuple[TenantSetting, ...]] = {
    group: tuple(setting for setting in SETTINGS.values() if setting.group == group)
    for group in dict.fromkeys(setting.group for setting in SETTINGS.values())
}


def problem(setting: TenantSetting, value: Any) -> str:
    """Return why a value cannot be that of the setting; empty if it can."""
    if setting.maximum is not None and not 0 <= value <= setting.maximum:
        return Text("%(name)s must be from 0 to %(maximum)s.", name=setting.name, maximum=setting.maximum)
    if setting.choices is not None and value not in setting.choices:
        return Text("%(name)s must be one of %(choices)s.", name=setting.name, choices=", ".join(setting.choices))
    return ""
