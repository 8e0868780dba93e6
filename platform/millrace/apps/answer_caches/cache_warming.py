"""Cache warming: prompts are computed ahead of their requests, in the batch class, under a daily budget of the tenant.

`do_warm_caches` chooses prompts whose expected saving exceeds their cost, and creates batches of them with one
`WarmedPrompt` for each line, in one transaction under the tenant's lock. So a run that is killed has warmed nothing or
everything, and of two concurrent runs the second one finds the prompts of the first one. Batches run each line once,
whichever process is killed. `settle_warmed` then records what each prompt has cost and saved.

Without warming, the first request of a prompt fills the cache at the standard price. So a warmed prompt saves what its
first hit saves, and only if there is one. The expected saving is that amount times the probability of a request while
the cache has the prompt.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from django.conf import settings
from django.db.models import Sum
from django.db.models.functions import Coalesce

from billing.currencies.amounts import FEMTO_A_NANO
from billing.models import CompiledRateCard, UsageEvent
from billing.rates.pricing import PriceIndex, RateCard, Tier, UnknownPriceError, price, reservation_nano
from inference_worker.contract.request import TokenCounts
from inference_worker.contract.texts import Text
from millrace.apps.answer_caches.models import WarmedPrompt
from millrace.apps.answer_caches.prompt_digests import PATHS
from millrace.apps.answer_caches.warming_candidates import DAY, Candidate, count_history, find_candidates, keys_of
from millrace.apps.answer_caches.warming_settlement import permits_warming, settle_warmed
from millrace.apps.batches.models import Batch, File
from millrace.apps.batches.storage import new_name
from millrace.apps.batches.tenant_actions import do_upload_file
from millrace.apps.request_log.stored_prompts import read_bodies
from tenants.actions.common import Conflict, locked_tenant
from tenants.models import ApiKey, Tenant
from tenants.work import announce_work

MAX_PROMPTS = 200  # per run
MAX_LISTED = 20  # candidates that a list shows
MAX_PRICED = 100  # candidates that are priced for a list, since some have no price
MAX_COPIED_BYTES = 8 * 2**20  # stored prompts that one run copies
MAX_FEMTO = 2**62  # maximum cost of one prompt; a higher one is an error of the price list
PREFIX_LIFETIME = timedelta(hours=4)  # assumed; the share of used prefixes corrects it
RUN_TIME = timedelta(hours=2)  # after that, prompts that have not started are not warmed
FILE_TIME = timedelta(days=1)
PREFIX_MARGIN_TOKENS = 64  # tokens that the last turn of a prefix may add
MESSAGES_PATH = PATHS["messages"]


@dataclass(frozen=True)
class PricedCandidate:
    """A candidate with its expected and its maximum cost.

    `standard_femto` is what its next request costs if it is not warmed, `hit_femto` what it costs if it is.
    """

    candidate: Candidate
    expected_femto: int  # saving less cost
    cost_femto: int
    max_femto: int
    standard_femto: int
    hit_femto: int
    prefix_tokens: int
    expires_at: datetime

    @property
    def warmed_femto(self) -> int:
        """Return the cost of computing the prompt ahead, with that of its next request."""
        return self.cost_femto + self.hit_femto


@dataclass(frozen=True)
class ListedCandidate:
    """A candidate of a list. `is_cached`: it need not be computed, because the cache has it or a batch computes it."""

    priced: PricedCandidate
    is_cached: bool

    @property
    def fingerprint(self) -> str:
        return self.priced.candidate.fingerprint.hex()

    @property
    def requests(self) -> int:
        return len(self.priced.candidate.requests)


@dataclass(frozen=True)
class CandidateList:
    """The most repeated prompts and prefixes, and the number of stored prompts that they were found in."""

    stored: int
    undigested: int  # stored prompts that were not searched, because they have no digests yet
    rows: Sequence[ListedCandidate]


@dataclass(frozen=True)
class WarmingRun:
    """What a run has chosen, and how many candidates it has left out for each reason.

    In a run of selected candidates, these numbers and `prompts` add up to the number of selected candidates.
    """

    prompts: int
    prefixes: int  # prompts that are prefixes
    not_worthwhile: int  # candidates whose expected saving does not cover their cost
    over_budget: int
    expected_femto: int
    max_femto: int
    cached: int = 0  # the cache has them, or a batch computes them
    without_key: int = 0  # all keys of their requests were revoked, have expired or may not run inference
    unpriced: int = 0  # their model has no price, or their last answer has no known length
    unavailable: int = 0  # selected ones that are no longer stored or repeated, or that no cache would store


def do_warm_caches(tenant: Tenant, *, only: Collection[bytes] | None = None, now: datetime | None = None) -> WarmingRun:
    """Settle earlier prompts, then have those computed whose expected saving is the highest, within the day's budget.

    With `only`, the candidates with these fingerprints are computed, also if their saving does not cover their cost.

    Raises:
        Conflict: the tenant has not opted in, or stores no prompts.
    """
    now = now or datetime.now(UTC)
    check_opted_in(tenant)
    settle_warmed(tenant, now=now)
    with locked_tenant(tenant) as locked:
        check_opted_in(locked)
        found, observed_since = find_candidates(locked.pk, now)
        wanted = [each for each in found if only is None or each.fingerprint in only]
        usable = _with_live_keys(locked, wanted)
        storable = [each for each in usable if _lifetime(locked, each.cache)]
        cold = _without_warm(locked, storable, now)
        priced = _price(locked, cold, now, observed_since)
        worthwhile = [each for each in priced if only is not None or each.expected_femto > 0]
        worthwhile.sort(key=lambda each: (-each.expected_femto / max(1, each.cost_femto), each.candidate.fingerprint))
        left = locked.cache_warming_nano * FEMTO_A_NANO - spent_femto(locked, now)
        chosen: list[PricedCandidate] = []
        for each in worthwhile[:MAX_PROMPTS]:
            if each.max_femto <= left:
                chosen.append(each)
                left -= each.max_femto
        over_budget = len(worthwhile) - len(chosen)
        chosen = _create_batches(locked, chosen, now)
    run = WarmingRun(
        prompts=len(chosen),
        prefixes=sum(each.candidate.cache == WarmedPrompt.Cache.PREFIX for each in chosen),
        not_worthwhile=len(priced) - len(worthwhile),
        over_budget=over_budget,
        expected_femto=sum(each.expected_femto for each in chosen),
        max_femto=sum(each.max_femto for each in chosen),
        cached=len(storable) - len(cold),
        without_key=len(wanted) - len(usable),
        unpriced=len(cold) - len(priced),
    )
    if only is None:
        return run
    known = run.prompts + run.over_budget + run.cached + run.without_key + run.unpriced
    return replace(run, unavailable=len(set(only)) - known)


def list_candidates(tenant: Tenant, *, now: datetime | None = None) -> CandidateList:
    """Return the most repeated prompts and prefixes that have digests and prices. The tenant's scope must be open.

    No stored prompt is read, so it takes bounded time.
    """
    now = now or datetime.now(UTC)
    count = count_history(tenant.pk, now)
    found, observed_since = find_candidates(tenant.pk, now)
    repeated = [each for each in _with_live_keys(tenant, found) if _lifetime(tenant, each.cache)]
    repeated.sort(key=lambda each: (-len(each.requests), each.fingerprint))
    priced = _price(tenant, repeated[:MAX_PRICED], now, observed_since)[:MAX_LISTED]
    cold = {each.fingerprint for each in _without_warm(tenant, [row.candidate for row in priced], now)}
    rows = [ListedCandidate(row, row.candidate.fingerprint not in cold) for row in priced]
    return CandidateList(count.stored, count.undigested, rows)


def spent_femto(tenant: Tenant, now: datetime) -> int:
    """Return what the tenant's prompts of this day cost, unsettled ones at their maximum. The scope must be open."""
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    rows = WarmedPrompt.objects.for_tenant(tenant).filter(created_at__gte=today)
    return int(rows.aggregate(spent=Sum(Coalesce("cost_femto", "max_femto"), default=0))["spent"])


def check_opted_in(tenant: Tenant) -> None:
    """Check that the tenant permits cache warming.

    Raises:
        Conflict: it does not; the message has the reason.
    """
    if not tenant.cache_warming_nano:
        raise Conflict(Text("Cache warming is off. Set a daily budget: cache_warming_nano."))
    if not tenant.content_retention_days:
        raise Conflict(Text("Prompts are not stored, so none can be warmed. Set content_retention_days."))
    if not permits_warming(tenant):
        raise Conflict(Text("The tenant is suspended."))


# Choice of the prompts.


def _with_live_keys(tenant: Tenant, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates with the requests of keys that can still be used."""
    keys = ApiKey.objects.for_tenant(tenant).filter(pk__in=keys_of(candidates))
    live = {key.pk for key in keys if key.is_live and "inference" in key.scopes}
    for candidate in candidates:
        candidate.requests = [request for request in candidate.requests if request.key_id in live]
    return [candidate for candidate in candidates if candidate.requests]


def _lifetime(tenant: Tenant, cache: WarmedPrompt.Cache) -> timedelta:
    is_answer = cache == WarmedPrompt.Cache.ANSWER
    return timedelta(seconds=tenant.answer_cache_seconds) if is_answer else PREFIX_LIFETIME


def _without_warm(tenant: Tenant, candidates: Iterable[Candidate], now: datetime) -> list[Candidate]:
    """Return the candidates that neither a request nor an earlier run has put into the cache. Each has a lifetime."""
    rows = WarmedPrompt.objects.for_tenant(tenant).filter(expires_at__gt=now)
    # A prompt that was not run may run again, and one that failed on the next day.
    warmed = {
        (row.cache, bytes(row.fingerprint))
        for row in rows
        if row.cost_femto is None or row.cost_femto > 0 or (row.request_id and row.created_at > now - DAY)
    }
    found = []
    for each in candidates:
        lifetime = _lifetime(tenant, each.cache)
        is_cached = each.computed_at is not None and each.computed_at + lifetime > now
        if not is_cached and (each.cache, each.fingerprint) not in warmed:
            found.append(each)
    return found


def _price(
    tenant: Tenant, candidates: Sequence[Candidate], now: datetime, observed_since: datetime
) -> list[PricedCandidate]:
    """Return the candidates that have prices."""
    vectors = settings.MILLRACE.semantic_cache_model if tenant.semantic_cache_max_error_percent else ""
    index = _prices({candidate.newest.model for candidate in candidates} | {vectors})
    at = round(now.timestamp() * 1_000_000)
    vector_card = index.find(tenant.pk, vectors, Tier.STANDARD, at) if vectors else None
    outputs = _output_tokens(tenant, [candidate.newest.request_id for candidate in candidates], now)
    used, warmed = _prefix_uses(tenant, now)
    priced = []
    for each in candidates:
        newest, is_answer = each.newest, each.cache == WarmedPrompt.Cache.ANSWER
        batch = index.find(tenant.pk, newest.model, Tier.BATCH, at)
        standard = index.find(tenant.pk, newest.model, Tier.STANDARD, at)
        if batch is None or standard is None or (is_answer and newest.request_id not in outputs):
            continue
        lifetime = _lifetime(tenant, each.cache)
        chance, of = each.probability(now, min(lifetime, DAY), observed_since)
        tokens = round(newest.prompt_tokens * each.prefix_share)
        try:
            if is_answer:
                output = outputs[newest.request_id]
                cost = price(batch, TokenCounts(newest.prompt_tokens, output=output), at).cost_femto
                cost += _vector_cost(vector_card, newest.prompt_tokens + output, at)
                usual = price(standard, TokenCounts(newest.prompt_tokens, output=output), at).cost_femto
                counts = TokenCounts(answer_hit_input=newest.prompt_tokens, answer_hit_output=output)
                hit = price(standard, counts, at)
                most = _maximum(batch, newest.prompt_tokens, newest.max_tokens, at, each.choices)
                most = max(most, (newest.reserved_nano or 0) * FEMTO_A_NANO)  # also that of a fallback's model
                most += _vector_cost(vector_card, newest.prompt_tokens + newest.max_tokens, at)
            else:
                cost = price(batch, TokenCounts(tokens, output=1), at).cost_femto
                usual = price(standard, TokenCounts(tokens), at).cost_femto
                hit = price(standard, TokenCounts(cache_read=tokens), at)
                most = _maximum(batch, newest.prompt_tokens + PREFIX_MARGIN_TOKENS, 1, at)
                most += _vector_cost(vector_card, newest.prompt_tokens + PREFIX_MARGIN_TOKENS, at)
                chance, of = chance * (used + 1), of * (warmed + 1)
        except UnknownPriceError:
            continue
        if most <= MAX_FEMTO:
            expected = hit.saved_femto * chance // of - cost
            length = 0 if is_answer else tokens
            costs = (expected, cost, most, usual, hit.cost_femto)
            priced.append(PricedCandidate(each, *costs, length, now + lifetime))
    return priced


def _maximum(card: RateCard, prompt_tokens: int, max_output: int, at: int, n: int = 1) -> int:
    return reservation_nano(card, prompt_tokens, max_output, at, n=n) * FEMTO_A_NANO


def _vector_cost(card: RateCard | None, tokens: int, at: int) -> int:
    """Return the cost of the vectors that the semantic cache needs of this text."""
    return 0 if card is None else price(card, TokenCounts(tokens), at).cost_femto


def _prices(models: Iterable[str]) -> PriceIndex:
    """Return the prices of the models. The tenant's scope must be open."""
    index = PriceIndex()
    rows = CompiledRateCard.objects.filter(model__in=list(models), tier__in=[Tier.STANDARD, Tier.BATCH])
    index.add(row.decode() for row in rows.order_by("pk"))
    return index


def _output_tokens(tenant: Tenant, request_ids: Iterable[str], now: datetime) -> dict[str, int]:
    """Return the length of the answers to settled requests."""
    rows = UsageEvent.objects.for_tenant(tenant).filter(
        request_id__in=set(request_ids), admitted_at__gte=now - 9 * DAY, outcome="completed"
    )
    return {row.request_id: row.output + row.answer_hit_output for row in rows.order_by("execution")}


def _prefix_uses(tenant: Tenant, now: datetime) -> tuple[int, int]:
    """Return how many of last week's warmed prefixes were used, and their number."""
    rows = WarmedPrompt.objects.for_tenant(tenant).filter(
        cache=WarmedPrompt.Cache.PREFIX, expires_at__range=(now - 7 * DAY, now)
    )
    ended = rows.exclude(request_id="")
    return ended.filter(hits__gt=0).count(), ended.count()


# Batches of the chosen prompts.


def _create_batches(tenant: Tenant, chosen: Sequence[PricedCandidate], now: datetime) -> list[PricedCandidate]:
    """Create a batch for each key and endpoint, and return the prompts in them. The tenant must be locked.

    Prompts whose stored body was removed, or is beyond `MAX_COPIED_BYTES`, are left out.
    """
    lines = _lines_of(tenant, chosen)
    chosen = [each for each in chosen if each.candidate.fingerprint in lines]
    groups: dict[tuple[int, str], list[PricedCandidate]] = defaultdict(list)
    for each in chosen:
        groups[each.candidate.newest.key_id, each.candidate.path].append(each)
    keys = ApiKey.objects.for_tenant(tenant).select_related("project").in_bulk({key_id for key_id, _ in groups})
    for (key_id, path), members in groups.items():
        texts = [_line(number, path, lines[each.candidate.fingerprint]) for number, each in enumerate(members)]
        file = do_upload_file(keys[key_id].project, "cache-warming.jsonl", texts, is_internal=True)
        is_anthropic = path == MESSAGES_PATH
        purpose = File.Purpose.MESSAGES if is_anthropic else File.Purpose.BATCH
        File.objects.for_tenant(tenant).filter(pk=file.pk).update(purpose=purpose, expires_at=now + FILE_TIME)
        batch = Batch.objects.create(
            name=new_name("msgbatch_" if is_anthropic else "batch_"),
            tenant_id=tenant.pk,
            project_id=file.project_id,
            key_id=key_id,
            dialect="anthropic" if is_anthropic else "openai",
            endpoint=path,
            is_internal=True,
            metadata={"purpose": "cache warming"},
            input_file=file.name,
            output_seconds=int(FILE_TIME.total_seconds()),
            expires_at=now + RUN_TIME,
        )
        announce_work()
        WarmedPrompt.objects.for_tenant(tenant).bulk_create(
            WarmedPrompt(
                tenant_id=tenant.pk,
                cache=each.candidate.cache,
                fingerprint=each.candidate.fingerprint,
                key_id=key_id,
                model=each.candidate.newest.model,
                source_request_id=each.candidate.newest.request_id,
                batch_id=batch.pk,
                batch_line=number,
                created_at=now,
                expires_at=each.expires_at,
                expected_femto=each.expected_femto,
                max_femto=each.max_femto,
                prefix_tokens=each.prefix_tokens,
            )
            for number, each in enumerate(members)
        )
    return chosen


def _lines_of(tenant: Tenant, chosen: Sequence[PricedCandidate]) -> dict[bytes, bytes]:
    """Return the JSON bodies that compute the prompts, by their fingerprint. Bodies are decoded one after another."""
    by_request: dict[str, list[Candidate]] = defaultdict(list)
    for each in chosen:
        by_request[each.candidate.newest.request_id].append(each.candidate)
    lines = {}
    for request_id, text in read_bodies(tenant.pk, list(by_request), MAX_COPIED_BYTES):
        for candidate in by_request[request_id]:
            body = candidate.body_of(text)
            if body is not None:
                lines[candidate.fingerprint] = json.dumps(body).encode()
    return lines


def _line(number: int, path: str, body: bytes) -> bytes:
    return b'{"custom_id": "%d", "method": "POST", "url": "%b", "body": %b}\n' % (number, path.encode(), body)
