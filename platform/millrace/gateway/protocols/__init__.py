"""API dialects: from the bodies of the OpenAI and Anthropic APIs to `InferenceRequest`, and from events to responses.

Readers (dialect_readers.py) decode a body into an `InferenceRequest`. Writers (writers.py) turn an execution's events
into the dialect's response. A `Dialect` (dialects.py) describes errors and headers. `prompts` tokenizes prompts and
`tools` parses tool calls in a model's text.
"""
