"""The cost of sampling by parameters: one table, with times as multiples of greedy sampling.

    python -m benchmarks.sampling

It uses one thread and bfloat16 logits of a vocabulary of 49,152 with a distribution like a language model's: a few
tokens have most of the probability, except in "flat". "long" has prompts of 8,192 random tokens, the others of 512, and
all outputs have 128 tokens so far. The parameters are measured in turn, and the minimum of the rounds counts.
"""

from __future__ import annotations

import argparse
import time

import torch

from benchmarks.options import parse
from inference_worker.contract.request import Request, SamplingParams
from inference_worker.engine.sampling.sampler import Sampler
from inference_worker.engine.sequences.sequence import Sequence

VOCAB = 49_152
ROWS = (1, 32, 200)
ANSWER = 128  # previously generated tokens
CASES: dict[str, tuple[SamplingParams, int]] = {  # parameters, prompt length
    "greedy": (SamplingParams(temperature=0), 512),
    "temperature": (SamplingParams(temperature=0.8), 512),
    "top_p": (SamplingParams(top_p=0.9), 512),
    "top_p, flat": (SamplingParams(top_p=0.9, temperature=1.5), 512),
    "top_k": (SamplingParams(top_k=50), 512),
    "min_p": (SamplingParams(min_p=0.05), 512),
    "bias": (SamplingParams(temperature=0, logit_bias=tuple((i * 100, 1.0) for i in range(300))), 512),
    "min_tokens": (SamplingParams(temperature=0, min_tokens=1000), 512),
    "presence": (SamplingParams(temperature=0, presence_penalty=0.5, frequency_penalty=0.5), 512),
    "repetition": (SamplingParams(temperature=0, repetition_penalty=1.1), 512),
    "repetition, long": (SamplingParams(temperature=0, repetition_penalty=1.1), 8192),
    "logprobs 0": (SamplingParams(temperature=0, logprobs=0), 512),
    "logprobs 20": (SamplingParams(temperature=0, logprobs=20), 512),
}


def sequences(rows: int, params: SamplingParams, prompt: int) -> list[Sequence]:
    made = []
    for i in range(rows):
        ids = torch.randint(VOCAB, (prompt + ANSWER,)).tolist()
        seq = Sequence(Request(f"r{i}", ids[:prompt], params), None)
        seq.tokens += ids[prompt:]
        made.append(seq)
    return made


def measure(rows: int, rounds: int) -> dict[str, float]:
    """Return the seconds of a step by sampling case."""
    ranks = torch.argsort(torch.rand(rows, VOCAB)) + 1
    logits = (20 - 1.6 * ranks.log()).bfloat16()  # probabilities fall with the 1.6th power of the rank
    batches = {case: sequences(rows, params, prompt) for case, (params, prompt) in CASES.items()}
    sampler = Sampler(eos_token_ids=(2,))
    best = dict.fromkeys(CASES, float("inf"))
    for _ in range(rounds):
        for case, seqs in batches.items():
            for seq in seqs:
                seq.tokens.append(int(torch.randint(VOCAB, ()).item()))
            began = time.perf_counter()
            sampler.sample(logits, seqs, [seq.num_tokens for seq in seqs]).read()
            best[case] = min(best[case], time.perf_counter() - began)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="of which the least time counts (default 10)")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="sequences in a step (default 1 32 200)")
    options = parse(parser, {"rounds": 1, "rows": (1, 8)})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'':18}" + "".join(f"{rows:>12} rows      " for rows in options.rows))
    columns = [measure(rows, options.rounds) for rows in options.rows]
    for case in CASES:
        cells = (f"{best[case] * 1e3:10.2f} ms {best[case] / best['greedy']:6.1f} x" for best in columns)
        print(f"{case:18}" + " ".join(cells))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
