"""Replicas among which jobs are placed."""

from __future__ import annotations

from inference_worker.contract.messages import BillingContext, Heartbeat, InferenceJob, encode
from inference_worker.contract.request import SamplingParams
from millrace.gateway.dispatch.placement import AFFINITY_TOKENS, Placement, PlacementChoice
from millrace.gateway.dispatch.replicas import ReplicaRegistry


def make_job(prompt: list[int], salt: bytes = b"salt") -> InferenceJob:
    return InferenceJob(BillingContext(0, "req", 0, 1, 1, 1, "m"), "gw", prompt, SamplingParams(), salt, 0.0)


def prompt(start: int, length: int = AFFINITY_TOKENS + 10) -> list[int]:
    return [start] * AFFINITY_TOKENS + list(range(length - AFFINITY_TOKENS))


class Fleet:
    def __init__(self, *names: str) -> None:
        self.board = ReplicaRegistry()
        self.placement = Placement(self.board)
        self.names = list(names)
        self.beat = 0
        self.batch = 0  # requests of the batch class, by replica
        for _ in range(2):
            self.beats()

    def beats(self, **running: int) -> None:
        self.beat += 1
        beats = {
            name.encode(): encode(
                Heartbeat(self.beat, "m", True, False, running.get(name, 0), 0, 16, 10, 0, batch=self.batch)
            )
            for name in self.names
        }
        self.board.update(beats)
        self.placement.observe()

    def send(self, job: InferenceJob) -> PlacementChoice:
        choice = self.placement.choose(job)
        assert choice is not None
        self.placement.note_sent(choice.replica_id)
        return choice
