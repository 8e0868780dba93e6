"""API dialects: OpenAI, Anthropic and Responses bodies, prompts and tool calls."""
