"""Ask two questions about one manual. The second request reads the manual from the cache."""

from __future__ import annotations

import os

import anthropic

MANUAL = "The reset button is on the back, below the socket. Press it for five seconds. " * 20
QUESTIONS = ("Where is the reset button?", "How long must it be pressed?")


def main() -> None:
    """Run the example."""
    url = os.environ.get("MILLRACE_URL", "http://127.0.0.1:8000")
    client = anthropic.Anthropic(base_url=url, api_key=os.environ["MILLRACE_API_KEY"])
    # The prompt up to this block is billed once as a write, then as reads until 5 minutes after its last use.
    manual = {"type": "text", "text": MANUAL, "cache_control": {"type": "ephemeral", "ttl": "5m"}}
    for question in QUESTIONS:
        answer = client.messages.create(
            model="smollm2-135m",
            max_tokens=20,
            system=[manual],
            messages=[{"role": "user", "content": question}],
        )
        usage = answer.usage
        print(
            f"input {usage.input_tokens}, written to the cache {usage.cache_creation_input_tokens},"
            f" read from it {usage.cache_read_input_tokens}"
        )


if __name__ == "__main__":
    main()
