"""Running experiments: the arm of a request. Does not import Django.

An experiment splits the requests for a model name between arms. All requests of a unit have the same arm: a keyed hash
of the unit selects it, so gateways need no shared state. The key is random, so experiments are independent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

ExperimentUnit = Literal["end_user", "conversation", "key", "metadata"]
MAX_ARMS = 4
CONVERSATION = "conversation_id"  # the metadata field that names a request's conversation
MAX_UNIT_LENGTH = 512
_SLOTS = 10_000  # a share of 1 % is 100 slots


class ExperimentArm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An arm. Without a model, the routing policy selects it."""

    name: str
    share: int  # percent of the units
    model: str = ""


class RunningExperiment(msgspec.Struct, frozen=True, omit_defaults=True):
    """An experiment on a model name, as gateways read it. The first arm is the control."""

    id: int
    unit: ExperimentUnit
    seed: str  # key of the hash, in hexadecimal digits
    arms: tuple[ExperimentArm, ...]
    metadata_key: str = ""  # metadata field whose value is the name of the arm, if the unit is `metadata`


class ArmAssignment(NamedTuple):
    """The arm of a request."""

    experiment_id: int
    arm: int
    unit: str  # the hash of the unit


def assign(
    experiment: RunningExperiment, *, key_id: int, user: str | None, metadata: Mapping[str, str], cache_key: str | None
) -> ArmAssignment | None:
    """Return the arm of a request; None if it has no unit, or if its unit is in no arm."""
    if experiment.unit == "key":
        unit = str(key_id)
    elif experiment.unit == "end_user":
        unit = user or ""
    elif experiment.unit == "conversation":
        unit = metadata.get(CONVERSATION) or cache_key or ""
    else:
        return _named_arm(experiment, metadata, user or metadata.get(CONVERSATION) or str(key_id))
    if not unit:
        return None
    digest = _digest(experiment, unit)
    slot = int.from_bytes(digest[:8], "big") % _SLOTS
    upto = 0
    for number, arm in enumerate(experiment.arms):
        upto += arm.share * (_SLOTS // 100)
        if slot < upto:
            return ArmAssignment(experiment.id, number, digest.hex())
    return None


def _named_arm(experiment: RunningExperiment, metadata: Mapping[str, str], unit: str) -> ArmAssignment | None:
    name = metadata.get(experiment.metadata_key)
    for number, arm in enumerate(experiment.arms):
        if arm.name == name:
            return ArmAssignment(experiment.id, number, _digest(experiment, f"{number}/{unit}").hex())
    return None


def _digest(experiment: RunningExperiment, unit: str) -> bytes:
    text = unit[:MAX_UNIT_LENGTH].encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, key=bytes.fromhex(experiment.seed), digest_size=16).digest()
