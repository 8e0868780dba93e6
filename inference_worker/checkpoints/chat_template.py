"""Chat templates: Jinja that comes with a model's files, rendered in a sandbox with a budget of work.

Templates are rendered as transformers renders them, with the same options, globals and filters. So the tokens of a
prompt are the ones that the model was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.meta

from inference_worker.checkpoints.template_sandbox import SandboxEnvironment
from inference_worker.checkpoints.template_work import TemplateWorkError, WorkBudget, WorkContext

MAX_TEMPLATE_CHARS = 1 << 18
MAX_OUTPUT_CHARS = 1 << 25
MAX_ERROR_CHARS = 1000


class ChatTemplateError(ValueError):
    """An error of a chat template: it rejected the messages, failed on them or exceeded its limits."""


class ChatTemplateWorkError(ChatTemplateError):
    """Raised if a chat template needs more work than its budget."""


class ChatTemplate:
    """A compiled chat template. Every rendering receives `variables`, such as bos_token."""

    def __init__(self, source: str, variables: dict[str, Any]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ChatTemplateError(f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS}")
        environment = SandboxEnvironment()
        try:
            named = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError) as exc:
            raise ChatTemplateError(f"the chat template does not compile: {exc}") from None
        self._template.globals = dict(self._template.globals)  # copied by each rendering; a ChainMap is slower
        self._units = environment.block_units
        self._variables = variables
        self.takes_tools = "tools" in named  # other templates ignore tools silently

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_prompt: bool,
        variables: Mapping[str, Any] = MappingProxyType({}),
        budget: WorkBudget | None = None,
    ) -> str:
        """Return the prompt's text. `variables` are further variables, which override none of the others.

        Args:
            budget: the work that this rendering may use; None: an amount in proportion to the input.

        Raises:
            ChatTemplateError: the template rejected the messages or exceeded its limits.
        """
        pieces: list[str] = []
        room = MAX_OUTPUT_CHARS
        context = self._template.new_context(
            {
                **variables,
                **self._variables,
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_prompt,
            }
        )
        try:
            allowance = WorkBudget.for_input(messages, tools, variables)
            budget = allowance if budget is None else budget
            if isinstance(context, WorkContext):
                context.budget = budget
            budget.charge(self._units)
            for piece in self._template.root_render_func(context):
                room -= len(piece)
                if room < 0:
                    raise ChatTemplateError("the rendered messages are too long")
                pieces.append(piece)
        except ChatTemplateError:
            raise
        except TemplateWorkError as exc:
            raise ChatTemplateWorkError(str(exc)) from None
        # A template is code that runs on the caller's input, so every exception is an error of that input.
        except Exception as exc:  # noqa: BLE001
            raise ChatTemplateError(str(exc)[:MAX_ERROR_CHARS] or type(exc).__name__) from None
        return "".join(pieces)
