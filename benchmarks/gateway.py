"""The gateway's overhead compared with other gateways in the same run, and the delays of many parallel streams.

    python -m benchmarks.gateway --litellm /path/to/its/venv/bin/python --portkey "npx @portkey-ai/gateway"

Millrace: one gateway process with authentication, limits, metering and settlement; behind it, through the broker, a
Celery worker whose engine responds immediately. LiteLLM: one process with a master key; behind it a server that
responds immediately. It is also measured with its beta setting `rust` on `/v1/messages`, if its Rust path answers.
Portkey: one process of its open gateway in front of the same server; it has no keys, limits or metering. All are
measured in turn with 1, 16 and 64 connections, each when the processes of the others are at rest; `busy` is the number
of measurements that began on a busy machine. The results are medians over the rounds, and `max` is the longest latency
of all rounds. The CPU time per request is printed for Millrace's processes and for each other gateway.

With --upstream, Millrace's worker is a relay to the same server instead, with a credential that the platform seals to
it, and the rate limits that the server reports. All systems then do the same work. The latency at one connection is
divided into the CPU time of each process and the rest, in which no process of Millrace computes.

Then many streams of 50 tokens per second each run through one gateway. Every token must arrive in time, and clients
that stop reading must not affect the others. The load, the databases and all systems share the machine's cores. The
exit status is 1 if a request failed.

The other gateways are optional: `pip install 'litellm[proxy]'` in a separate virtual environment, and
`npm install @portkey-ai/gateway` or npx.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from dataclasses import replace as with_changes
from functools import partial
from pathlib import Path
from typing import Any

import redis

from benchmarks.connections import cpu_seconds
from benchmarks.gateway_load import ClosedLoopResult, StreamsResult, closed_loop, many_streams, request_bytes
from benchmarks.options import parse, write_figures
from benchmarks.rest import LIMIT_SECONDS, Rest
from inference_worker.contract.deployments import (
    WANTED_KEY,
    WantedDeployment,
    WantedDeployments,
    encode_wanted,
)
from inference_worker.contract.managed_commands import sign_managed
from inference_worker.contract.settings import ModelSpec
from inference_worker.contract.upstreams import UpstreamEngine, UpstreamSpec
from millrace.local.program import Program, free_port
from millrace.local.stack import Stack
from tests.support.models import share_models

ROOT = Path(__file__).resolve().parents[1]

MODEL = "bench"
ENCODER = "all-minilm-l6-v2"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Say something nice."}], "max_tokens": 8}
MASTER_KEY = "sk-" + "b7" * 24
CONNECTIONS = (1, 16, 64)
FIRST_BYTES = 100  # streams whose first byte is timed
Processes = dict[str, "subprocess.Popen[bytes]"]
LIMITS = {
    "requests_per_minute": 10**9,
    "input_tokens_per_minute": 10**9,
    "output_tokens_per_minute": 10**9,
    "tokens_per_day": 10**11,
    "concurrency": 10**6,
}


@dataclass(frozen=True)
class ChatEndpoint:
    """An endpoint of chat completions, or of Anthropic's messages."""

    name: str
    url: str
    key: str
    headers: Mapping[str, str] = field(default_factory=dict)
    pid: int = 0  # a gateway's first process, which leads their session; 0 for Millrace, which has several programs

    def request(self, **more: Any) -> bytes:
        return request_bytes(self.url, self.key, BODY | more, self.headers)


def main() -> int:
    """Measure and print. Return 1 if a request failed, else 0."""
    options = parse_arguments()
    asyncio.set_event_loop_policy(_fastest_loop())
    report: dict[str, Any] = {"validation_ms": validation()}
    with ExitStack() as running:
        if not options.litellm:
            print("Without LiteLLM: --litellm names the python of its virtual environment.")
        if not options.portkey:
            print("Without Portkey: --portkey is the command that starts its gateway.\n")
        mock = running.enter_context(upstream())
        spec = None
        if options.upstream:
            base_url = mock.url.removesuffix("/chat/completions")
            spec = UpstreamSpec(UpstreamEngine.OPENAI, base_url, MODEL, allow_internal=True, concurrency=1024)
        millrace, processes = running.enter_context(platform(options.pace if options.quick else 0, spec))
        report |= compare(options, millrace, processes, mock, running)
        if options.quick and not options.upstream:  # one platform is enough to see that everything works
            report |= stream(options, millrace, processes)
    if options.streams and not options.quick and not options.upstream:
        with platform(pace=options.pace) as (millrace, processes):
            report |= stream(options, millrace, processes)
    write_figures(options, report)
    rows = [*report["compared"].values(), *report.get("streams", {}).values()]
    return int(any(row.get("errors") for row in rows))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--litellm", help="the python of a virtual environment with the package litellm[proxy]")
    parser.add_argument("--portkey", help="the command of Portkey's gateway, such as 'npx @portkey-ai/gateway'")
    parser.add_argument(
        "--upstream", action="store_true", help="let Millrace relay to the same server as the others; no streams"
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each measurement (default 8)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of which the median counts (default 3)")
    parser.add_argument("--streams", type=int, default=256, help="parallel streams; 0: none (default 256)")
    parser.add_argument(
        "--stalled", type=int, default=8, help="additional streams whose clients stop reading (default 8)"
    )
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of each stream (default 1000: 20 seconds)")
    parser.add_argument("--pace", type=float, default=50.0, help="tokens per second of each stream (default 50)")
    parser.add_argument("--json", help="write the figures to this file too")
    return parse(parser, {"seconds": 1.0, "rounds": 1, "streams": 4, "stalled": 1, "tokens": 20})


def compare(
    options: argparse.Namespace, millrace: ChatEndpoint, processes: Processes, mock: ChatEndpoint, running: ExitStack
) -> dict[str, Any]:
    servers = [millrace]
    if options.litellm:
        servers.append(running.enter_context(litellm(options.litellm, mock)))
        servers += running.enter_context(litellm_rust(options.litellm, mock))
    if options.portkey:
        servers.append(running.enter_context(portkey(options.portkey, mock)))
    servers.append(mock)
    figures: dict[str, dict[int, list[ClosedLoopResult]]] = {
        server.name: {connections: [] for connections in CONNECTIONS} for server in servers
    }
    others = {server.name: server.pid for server in servers if server.pid}
    # CPU microseconds per request, at 16 connections and at one
    costs, single = ({name: [] for name in (*processes, *others)} for _ in range(2))
    for server in servers:  # warm up
        measured = asyncio.run(closed_loop(server.url, server.request(), 16, min(3.0, options.seconds)))
        assert not measured.errors, (server.name, measured.errors[:3])
    rest = Rest(0 if options.quick else LIMIT_SECONDS)
    busy = dict.fromkeys(figures, 0)
    for _ in range(options.rounds):
        for connections in CONNECTIONS:
            for server in servers:
                busy[server.name] += not rest.wait()
                before = cpu_times(processes) if server is millrace else {server.name: session_cpu_seconds(server.pid)}
                result = asyncio.run(closed_loop(server.url, server.request(), connections, options.seconds))
                figures[server.name][connections].append(result)
                after = cpu_times(processes) if server is millrace else {server.name: session_cpu_seconds(server.pid)}
                kept = {1: single, 16: costs}.get(connections, {})
                for name in after.keys() & kept.keys():
                    kept[name].append(1e6 * (after[name] - before[name]) / max(1, len(result.latencies)))
    rows = table(figures, busy)
    medians = {name: statistics.median(values) for name, values in costs.items()}
    print("CPU per request at 16 connections: " + ", ".join(f"{name} {cost:.0f} us" for name, cost in medians.items()))
    parts = {name: statistics.median(single[name]) / 1e3 for name in processes}
    rest = rows["millrace"]["p50_ms"] - sum(parts.values())
    print(
        f"Millrace's {rows['millrace']['p50_ms']:.2f} ms at one connection: "
        + ", ".join(f"{name} {ms:.2f} ms of CPU" for name, ms in parts.items())
        + f", the server alone {rows['mock']['p50_ms']:.2f} ms, waiting {rest - rows['mock']['p50_ms']:.2f} ms"
    )
    print("resident memory: " + ", ".join(f"{name} {mib:.0f} MiB" for name, mib in memory(processes).items()) + "\n")
    return {"compared": rows, "cpu_us_per_request": medians, "cpu_ms_at_one_connection": parts}


def table(figures: dict[str, dict[int, list[ClosedLoopResult]]], busy: dict[str, int]) -> dict[str, Any]:
    """Print and return the medians, and the ratios between Millrace and LiteLLM.

    busy: how many measurements of each server began on a busy machine.
    """
    rows: dict[str, dict[str, float]] = {}
    bare = median(figures["mock"][1], lambda run: statistics.median(run.latencies))
    print(
        f"{'':12} {'p50, 1 conn':>12} {'added':>9} {'p99, 1 conn':>12} {'req/s, 16':>10}"
        f" {'p50, 16':>9} {'p99, 16':>9} {'max, 16':>9} {'req/s, 64':>10} {'p50, 64':>9} {'max, 64':>9} errors   busy"
    )
    for name in figures:
        single, parallel, many = (figures[name][connections] for connections in CONNECTIONS)
        row = {
            "p50_ms": 1e3 * median(single, lambda run: statistics.median(run.latencies)),
            "p99_ms": 1e3 * median(single, lambda run: percentile(run.latencies, 0.99)),
            "rate_16": median(parallel, lambda run: run.rate),
            "p50_16_ms": 1e3 * median(parallel, lambda run: statistics.median(run.latencies)),
            "p99_16_ms": 1e3 * median(parallel, lambda run: percentile(run.latencies, 0.99)),
            "max_16_ms": 1e3 * max(max(run.latencies) for run in parallel),
            "rate_64": median(many, lambda run: run.rate),
            "p50_64_ms": 1e3 * median(many, lambda run: statistics.median(run.latencies)),
            "max_64_ms": 1e3 * max(max(run.latencies) for run in many),
            "errors": sum(len(run.errors) for run in single + parallel + many),
            "busy": busy[name],
        }
        # Millrace includes its worker. For the other gateways, the latency of the mock server is subtracted.
        row["added_ms"] = row["p50_ms"] - (0.0 if name in ("millrace", "mock") else 1e3 * bare)
        rows[name] = row
        print(
            f"{name:12} {row['p50_ms']:>9.2f} ms {row['added_ms']:>6.2f} ms {row['p99_ms']:>9.2f} ms"
            f" {row['rate_16']:>10.0f} {row['p50_16_ms']:>6.2f} ms"
            f" {row['p99_16_ms']:>6.1f} ms {row['max_16_ms']:>6.0f} ms"
            f" {row['rate_64']:>10.0f} {row['p50_64_ms']:>6.2f} ms {row['max_64_ms']:>6.0f} ms {row['errors']:>6.0f}"
            f" {row['busy']:>6.0f}"
        )
    if "litellm" in rows:
        rate = rows["millrace"]["rate_16"] / rows["litellm"]["rate_16"]
        added = rows["millrace"]["added_ms"] / rows["litellm"]["added_ms"]
        print(f"\ncompared with LiteLLM: {rate:.2f} times the requests per second (target: 5 or more),")
        print(f"                       {added:.2f} times the added latency (target: 0.4 or less)\n")
        rows["ratios"] = {"rate": rate, "added": added}
    return rows


def stream(options: argparse.Namespace, millrace: ChatEndpoint, processes: Processes) -> dict[str, Any]:
    """Measure parallel streams, without and with clients that stop reading."""
    request = millrace.request(stream=True, max_tokens=options.tokens)
    seconds = options.tokens / options.pace + 30
    asyncio.run(many_streams(millrace.url, millrace.request(stream=True, max_tokens=50), 16, 50, 0, 30))
    report: dict[str, Any] = {"first byte": first_byte(millrace)}
    print(f"{options.streams} streams at {options.pace:g} tokens/s, {options.tokens} tokens each, one gateway:")
    for stalled in (0, options.stalled):
        before, cpu_before = memory(processes), cpu_times(processes)
        result = asyncio.run(many_streams(millrace.url, request, options.streams, options.tokens, stalled, seconds))
        after = memory(processes)
        report[f"{stalled} stalled"] = line = describe(result, before, after)
        for name, used in cpu_times(processes).items():
            line[f"{name} CPU per token"] = f"{1e6 * (used - cpu_before[name]) / max(1, result.received):.0f} us"
        print(f"  {stalled} readers stalled: " + ", ".join(f"{name} {value}" for name, value in line.items()))
        for error in result.errors[:3]:
            print(f"    ! {error}")
    return {"streams": report}


def first_byte(millrace: ChatEndpoint) -> dict[str, Any]:
    """Measure the time from a worker's first token to its arrival at the client, one stream at a time."""
    request = millrace.request(stream=True, max_tokens=2)
    runs = [asyncio.run(many_streams(millrace.url, request, 1, 2, 0, 30)) for _ in range(FIRST_BYTES)]
    milliseconds = [1e3 * run.delays[0] for run in runs if run.delays]
    errors = sum(len(run.errors) for run in runs) + len(runs) - len(milliseconds)
    median_ms, late_ms = statistics.median(milliseconds), percentile(milliseconds, 0.99)
    print(
        f"first byte after the worker's first token: p50 {median_ms:.2f} ms (target: 2 or less), p99 {late_ms:.2f} ms"
    )
    return {"p50_ms": median_ms, "p99_ms": late_ms, "errors": errors}


def describe(result: StreamsResult, before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    milliseconds = [1e3 * delay for delay in result.delays] or [0.0]
    return {
        "tokens lost": result.expected - result.received,
        "late (over 100 ms)": sum(delay > 100 for delay in milliseconds),
        "delay p50": f"{statistics.median(milliseconds):.1f} ms",
        "p99": f"{percentile(milliseconds, 0.99):.1f} ms",
        "most": f"{max(milliseconds):.1f} ms",
        "errors": len(result.errors),
        **{f"{name} MiB": f"{before[name]:.0f} → {after[name]:.0f}" for name in before},
    }


def median(runs: list[ClosedLoopResult], of: Any) -> float:
    return statistics.median(of(run) for run in runs)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def cpu_times(processes: Processes) -> dict[str, float]:
    """Return the CPU time that each process has used, in seconds."""
    return {name: cpu_seconds(process.pid) for name, process in processes.items()}


def session_cpu_seconds(pid: int) -> float:
    """Return the CPU time in seconds of the session that the process leads, without processes that have ended."""
    seconds = 0.0
    for path in Path("/proc").glob("[0-9]*/stat") if pid else ():
        with suppress(OSError, IndexError):
            if int(path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[3]) == pid:
                seconds += cpu_seconds(int(path.parent.name))
    return seconds


def memory(processes: Processes) -> dict[str, float]:
    """Return the resident memory of each process in MiB."""
    result = {}
    for name, process in processes.items():
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        result[name] = int(status.partition("VmRSS:")[2].split()[0]) / 1024
    return result


@contextmanager
def platform(
    pace: float,
    upstream: UpstreamSpec | None = None,
    answer_cache_seconds: int = 0,
    *,
    embeds: bool = False,
    gateway_settings: Mapping[str, str] | None = None,
    **settings: str,
) -> Iterator[tuple[ChatEndpoint, Processes]]:
    """Run the platform with an engine that computes nothing, or with the upstream. `settings`: of the worker.

    With `embeds`, a worker of the bundled embedding model runs too, and the model name `similar` serves answers to
    similar questions.
    """
    with ExitStack() as running:
        state = Path(tempfile.mkdtemp(prefix="millrace-gateway-"))
        running.callback(shutil.rmtree, state, ignore_errors=True)
        state.chmod(0o711)
        share_models(state)
        environ = platform_environ(state, embeds=embeds)
        stack = Stack(environ)
        stack.store_secrets()
        services = {program.name: start(program, state, running) for program in stack.prepare_services()}
        assert stack.postgres is not None
        stack.postgres.make_roles()
        key = set_up(stack, state, _CACHE % answer_cache_seconds + _SIMILAR * embeds)
        programs = {program.name: program for program in stack.programs()}
        worker = benchmark_worker(programs[f"worker-{MODEL}"], pace, upstream, settings)
        if embeds:
            start(programs[f"worker-{ENCODER}"], state, running)
        gateway = programs["gateway"]
        gateway = with_changes(gateway, environ={**gateway.environ, **(gateway_settings or {})})
        processes = {
            "settler": start(programs["settler"], state, running),
            "worker": start(worker, state, running),
            "gateway": start(gateway, state, running),
            "valkey": services["valkey"],
        }
        url = f"http://127.0.0.1:{environ['MILLRACE_PORT']}/v1/chat/completions"
        while upstream is not None and not answers(url, key):  # until the relay is ready
            if upstream.engine != UpstreamEngine.MANAGED:
                run_django(stack, state, "from tenants.tasks import deliver_credentials; deliver_credentials()")
        yield ChatEndpoint("millrace", url, key), processes


def platform_environ(state: Path, *, embeds: bool) -> dict[str, str]:
    """Return the environment of a platform with this data directory."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MILLRACE_", "DJANGO_"))}
    environ |= {
        "MILLRACE_DATA_DIR": str(state),
        "MILLRACE_PORT": str(free_port()),
        "MILLRACE_MODELS": f"{MODEL}=embedded" + f",{ENCODER}=embedded:minilm" * embeds,
        "MILLRACE_MAX_NUM_SEQS": "1024",
        "MILLRACE_MAX_NUM_BATCHED_TOKENS": "1024",
        "MILLRACE_LOG_LEVEL": "warning",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "platform")]),
    }
    if embeds:  # so that each lookup is measured, however long its vector takes
        environ["MILLRACE_SEMANTIC_CACHE_WAIT_MS"] = "5000"
    return environ


def benchmark_worker(
    worker: Program, pace: float, upstream: UpstreamSpec | None, settings: Mapping[str, str]
) -> Program:
    """Return the program that takes the worker's place: an engine that computes nothing, or a relay to the upstream."""
    environ = {**worker.environ, "MILLRACE_INSTANT_PACE": str(pace)}
    if upstream is None:
        return with_changes(worker, argv=(sys.executable, "-m", "benchmarks.instant_worker"), environ=environ)
    deploy(environ, upstream)
    environ = {**worker.environ, **settings, "MILLRACE_WORKER_MODEL": "none", "MILLRACE_WORKER_POOLS": "default"}
    return with_changes(worker, environ=environ, ready=lambda: True)


def deploy(environ: Mapping[str, str], upstream: UpstreamSpec) -> None:
    """Make the upstream the only deployment, with the credential of `set_up`."""
    if upstream.engine == UpstreamEngine.MANAGED:
        signature = sign_managed(MODEL, upstream, environ["MILLRACE_WORKER_SECRET"])
        upstream = with_changes(upstream, signature=signature)
    else:
        upstream = with_changes(upstream, credential=1)
    spec = ModelSpec(MODEL, upstream.base_url or upstream.model, "auto", upstream=upstream)
    with redis.Redis.from_url(environ["MILLRACE_VALKEY_URL"]) as broker:
        broker.set(WANTED_KEY, encode_wanted(WantedDeployments((WantedDeployment(spec, {"default": 1}),))))


def run_django(stack: Stack, state: Path, code: str) -> None:
    """Run code in a process of the platform."""
    command = stack.command("django", "shell", "-c", code)
    with (state / "django.log").open("ab") as log:
        subprocess.run(command.argv, env=dict(command.environ), stdout=log, stderr=log, check=True)  # noqa: S603


def set_up(stack: Stack, state: Path, cache: str) -> str:
    """Create the tables, a tenant whose account, project and key have limits, and the model's files. Return the key."""
    assert stack.postgres is not None
    owner = {"MILLRACE_MIGRATION_DATABASE_URL": stack.postgres.owner_url}  # role that owns the tables
    django = (("django", "migrate", "--no-input"), ("django", "shell", "-c", _SET_UP + cache))
    for command in (stack.command(*words) for words in (*django, ("millrace.cli.convert",))):
        environ = {**command.environ, **(owner if "migrate" in command.argv else {})}
        with (state / "django.log").open("ab") as log:
            subprocess.run(command.argv, env=environ, stdout=log, stderr=log, check=True)  # noqa: S603
    credentials = json.loads((state / "credentials.json").read_text(encoding="utf-8"))
    return str(credentials["demo_key"])


_SET_UP = f"""
from django.core.management import call_command
call_command("bootstrap")
call_command("price_book", "backfill")
from tenants import actions
from tenants.actions.credentials import do_create_credential
from tenants.models import ApiKey, Project, Tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
with all_tenants_scope(BypassReason.COMMAND):
    tenant = Tenant.objects.all_tenants().get()
    key = ApiKey.objects.all_tenants().get()
    project = Project.objects.all_tenants().get()
limits = {LIMITS!r}
actions.do_set_limits(tenant, limits)
actions.do_set_limits(tenant, limits, project=project)
actions.do_set_limits(tenant, limits, key=key)
do_create_credential(None, "bench", "sk-bench")
"""
_CACHE = "actions.do_update_settings(tenant, answer_cache_seconds=%d, answer_cache_sampled=False)\n"
_SIMILAR = f"""
from django.utils import timezone
from inference_worker.contract.settings import parse_models
from millrace.apps.answer_caches.models import SemanticEvidence
actions.do_update_settings(tenant, semantic_cache_max_error_percent=20)
actions.do_update_settings(tenant, content_retention_days=1)
(spec,) = parse_models("{ENCODER}=embedded:minilm")
policy = {{"rules": [{{"targets": [{{"model": {MODEL!r}}}]}}], "semantic_cache": True}}
actions.do_publish_policy(tenant, "similar", policy)
with all_tenants_scope(BypassReason.COMMAND):
    for band in range(4):
        SemanticEvidence.objects.all_tenants().create(
            tenant_id=tenant.pk, embedding=spec.key, band=band, correct=1000, updated_at=timezone.now()
        )
"""


@contextmanager
def upstream() -> Iterator[ChatEndpoint]:
    """Run the server that answers immediately."""
    port = free_port()
    words = ("benchmarks.instant_upstream:application", "--port", str(port), "--log-level", "warning")
    with ExitStack() as running:
        state = Path(running.enter_context(tempfile.TemporaryDirectory()))
        argv = (sys.executable, "-m", "uvicorn", *words, "--no-access-log")
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        program = Program("mock", argv, environ=dict(os.environ), cwd=ROOT, ready=lambda: answers(url, "none"))
        start(program, state, running)
        yield ChatEndpoint("mock", url, "none")


@contextmanager
def litellm(python: str, mock: ChatEndpoint) -> Iterator[ChatEndpoint]:
    """Run LiteLLM's proxy in one process, in front of the mock server."""
    upstream = {"model": f"openai/{MODEL}", "api_base": mock.url.removesuffix("/chat/completions")}
    with litellm_proxy(python, upstream, "/v1/chat/completions") as (url, pid):
        yield ChatEndpoint("litellm", url, MASTER_KEY, pid=pid)


@contextmanager
def litellm_rust(python: str, mock: ChatEndpoint) -> Iterator[list[ChatEndpoint]]:
    """Run LiteLLM's proxy with its setting `rust`, in front of the mock of Anthropic's API.

    Only `/v1/messages` for Anthropic has a Rust path. Without the header of that path, there is no endpoint.
    """
    upstream = {"model": f"anthropic/{MODEL}", "api_base": mock.url.removesuffix("/v1/chat/completions")}
    with litellm_proxy(python, upstream, "/v1/messages", LITELLM_RUST="true") as (url, pid):
        headers = answer_headers(url, MASTER_KEY)
        if headers is not None and headers.get("x-litellm-rust") == "true":
            yield [ChatEndpoint("litellm-rust", url, MASTER_KEY, pid=pid)]
        else:
            print("Without LiteLLM's Rust path: its response does not have the header `x-litellm-rust`.\n")
            yield []


@contextmanager
def litellm_proxy(python: str, upstream: dict[str, str], path: str, **environ: str) -> Iterator[tuple[str, int]]:
    """Run a LiteLLM proxy with one model. Return the URL of its endpoint, and its process ID."""
    port = free_port()
    with ExitStack() as running:
        state = Path(running.enter_context(tempfile.TemporaryDirectory()))
        config = {
            "model_list": [{"model_name": MODEL, "litellm_params": {**upstream, "api_key": "none"}}],
            "general_settings": {"master_key": MASTER_KEY},
        }
        (state / "config.yaml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        script = Path(python).parent / "litellm"
        argv = (str(script), "--config", str(state / "config.yaml"), "--port", str(port), "--num_workers", "1")
        url = f"http://127.0.0.1:{port}{path}"
        environ = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", **environ}
        environ.pop("PYTHONPATH", None)
        ready = partial(answers, url, MASTER_KEY)
        program = Program("litellm", argv, environ=environ, ready=ready, ready_seconds=180.0)
        yield url, start(program, state, running).pid


@contextmanager
def portkey(command: str, mock: ChatEndpoint) -> Iterator[ChatEndpoint]:
    """Run Portkey's gateway in one process, in front of the mock server."""
    port = free_port()
    host = mock.url.removesuffix("/chat/completions")
    headers = {"x-portkey-provider": "openai", "x-portkey-custom-host": host}
    with ExitStack() as running:
        state = Path(running.enter_context(tempfile.TemporaryDirectory()))
        argv = (*shlex.split(command), f"--port={port}", "--headless")
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        ready = partial(answers, url, "none", headers)
        program = Program("portkey", argv, environ=dict(os.environ), ready=ready, ready_seconds=180.0)
        yield ChatEndpoint("portkey", url, "none", headers, start(program, state, running).pid)


def answers(url: str, key: str, headers: Mapping[str, str] | None = None) -> bool:
    return answer_headers(url, key, headers) is not None


def answer_headers(url: str, key: str, headers: Mapping[str, str] | None = None) -> Mapping[str, str] | None:
    """Send a request. Return the headers of the response, or None without a response of status 200."""
    all_headers = {"authorization": f"Bearer {key}", "content-type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, json.dumps(BODY).encode(), all_headers)  # noqa: S310  (our own http URL)
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:  # noqa: S310
            return answer.headers if answer.status == 200 else None
    except OSError:
        time.sleep(0.2)
        return None


def start(program: Program, state: Path, running: ExitStack) -> subprocess.Popen[bytes]:
    process = program.start(running.enter_context((state / f"{program.name}.log").open("ab")))
    running.callback(program.stop, process)
    return process


def validation(runs: int = 200) -> dict[str, float]:
    """Measure and print the CPU time, in milliseconds, to validate a body of 100 messages in each dialect."""
    from millrace.gateway.protocols.dialect_readers import READERS

    turns = [{"role": ("user", "assistant")[number % 2], "content": f"Message {number}. " * 4} for number in range(99)]
    turns.append({"role": "user", "content": "Continue."})
    bodies = {
        "openai.chat": {"messages": turns},
        "openai.chat, unknown fields": {"messages": [{**turn, "mood": "good"} for turn in turns]},
        "anthropic.messages": {"messages": turns, "max_tokens": 8},
        "openai.responses": {"input": turns},
    }
    figures = {}
    for name, fields in bodies.items():
        body, read = json.dumps({"model": MODEL, **fields}).encode(), READERS[name.partition(",")[0]]
        times = []
        for _ in range(runs):
            started = time.process_time()
            read(body)
            times.append(time.process_time() - started)
        figures[name] = round(statistics.median(times) * 1000, 3)
    print("Validation of 100 messages, ms:", ", ".join(f"{name} {figure}" for name, figure in figures.items()), "\n")
    return figures


def _fastest_loop() -> asyncio.AbstractEventLoopPolicy:
    import uvloop

    return uvloop.EventLoopPolicy()


if __name__ == "__main__":
    sys.exit(main())
