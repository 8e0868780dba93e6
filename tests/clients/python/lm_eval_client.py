"""lm-eval with its models local-completions and local-chat-completions."""

import json
import os

os.environ["OPENAI_API_KEY"] = os.environ["MATRIX_KEY"]  # for the requests; `auth_token` is for the tokenizer's

from features import *
from lm_eval.api.instance import Instance
from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI


def instances(kind, *arguments):
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def completions():
    return LocalCompletionsAPI(model=MODEL, base_url=f"{OPENAI_URL}/completions", auth_token=KEY, max_retries=1)


def chat(model=SCRIPTED, key=KEY):
    header = {"Authorization": f"Bearer {key}"}
    return LocalChatCompletion(
        model=model, base_url=f"{OPENAI_URL}/chat/completions", auth_token=KEY, header=header, max_retries=1
    )


def ask(llm, prompt, max_tokens):
    messages = JsonChatStr(json.dumps([{"role": "user", "content": prompt}]))
    (text,) = llm.generate_until(instances("generate_until", (messages, {"until": [], "max_gen_toks": max_tokens})))
    return text


def plain():
    llm = completions()
    assert llm.tokenizer_backend == "remote"  # the server's
    (text,) = llm.generate_until(
        instances("generate_until", ("Once upon a time", {"until": ["\n"], "max_gen_toks": 8}))
    )
    assert text
    pairs = [("The capital of France is", " Paris"), ("The capital of France is", " banana")]
    (paris, _), (banana, _) = llm.loglikelihood(instances("loglikelihood", *pairs))
    assert 0 > paris > banana
    assert ask(chat(), script("plain"), 20) == "Paris is the capital of France."


def call(key, model, prompt, max_tokens):
    ask(chat(model, key), prompt, max_tokens)


run({"plain": plain, **errors(call)})
