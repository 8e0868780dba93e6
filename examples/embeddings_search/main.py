"""Find the text that is closest in meaning to a question."""

from __future__ import annotations

import os

from openai import OpenAI

TEXTS = (
    "Cards are replaced within five working days.",
    "To reset a forgotten PIN, open the app and choose Security.",
    "The branch in the main street opens at nine.",
)
QUESTION = "I do not remember my PIN. What can I do?"


def main() -> None:
    """Run the example."""
    url = os.environ.get("MILLRACE_URL", "http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ["MILLRACE_API_KEY"])
    answer = client.embeddings.create(model="all-minilm-l6-v2", input=[*TEXTS, QUESTION])
    *vectors, question = [item.embedding for item in answer.data]
    # The vectors have length 1, so their dot product is the cosine similarity.
    scores = [sum(a * b for a, b in zip(vector, question, strict=True)) for vector in vectors]
    for score, text in sorted(zip(scores, TEXTS, strict=True), reverse=True):
        print(f"{score:.2f}  {text}")


if __name__ == "__main__":
    main()
