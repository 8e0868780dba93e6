"""The complexity score of a request: how much more likely the stronger of two models answers it well. No Django.

The classifier is a linear model of the words of the last user message and of its lengths. It is a part of the policy,
so it is versioned, compared and reverted with it. `millrace router train` creates it
(tenants.routing_policies.complexity_training).

A word is a run of letters, a digit or another character. Its bucket is the CRC-32 of the word modulo the number of
weights. A bucket counts once, and the sum is divided by the square root of the number of buckets.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import re
import zlib
from array import array
from functools import lru_cache

import msgspec

from inference_worker.contract.texts import Text
from tenants.routing_policies.errors import error_at

MAX_TEXT = 4000  # characters of a message that are read
MAX_BUCKETS = 2048
MAX_SCORE = 1000
_WORD = re.compile(r"[^\W\d_]+|\d|[^\w\s]|_")
LENGTHS = ("characters", "words", "digits", "lines", "questions")  # counts whose logarithms are features


class ComplexityModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trained classifier."""

    weights: str  # weights of the buckets: signed bytes in base64
    scale: float  # factor of the bytes
    lengths: tuple[float, ...]  # weights of LENGTHS
    bias: float
    trained: str = ""  # a note on its origin

    @property
    def fingerprint(self) -> str:
        """Return a hash of what determines scores."""
        values = (self.weights, self.scale, self.lengths, self.bias)
        return hashlib.blake2b(msgspec.json.encode(values), digest_size=4).hexdigest()


def buckets(text: str, count: int) -> set[int]:
    """Return the buckets of a text's words."""
    words = set(_WORD.findall(text[:MAX_TEXT].lower()))
    return {zlib.crc32(word.encode("utf-8", "surrogatepass")) % count for word in words}


def length_features(text: str) -> tuple[float, ...]:
    """Return the values of LENGTHS."""
    text = text[:MAX_TEXT]
    counts = (len(text), len(text.split()), sum(map(str.isdigit, text)), text.count("\n"), text.count("?"))
    return tuple(math.log1p(count) for count in counts)


def score(model: ComplexityModel, text: str) -> int:
    """Return the complexity of a message, from 0 to MAX_SCORE."""
    weights = _weights(model.weights)
    found = buckets(text, len(weights))
    total = model.bias + sum(map(float.__mul__, model.lengths, length_features(text)))
    if found:
        total += model.scale * sum(weights[bucket] for bucket in found) / math.sqrt(len(found))
    return round(MAX_SCORE / (1 + math.exp(-max(-50.0, min(50.0, total)))))


def check_model(place: str, model: ComplexityModel) -> None:
    """Check a classifier.

    Raises:
        ValueError: a value is invalid. The message contains its path.
    """
    try:
        count = len(_weights(model.weights))
    except (ValueError, binascii.Error):
        raise error_at(f"{place}.weights", Text("expected base64")) from None
    if not 1 <= count <= MAX_BUCKETS:
        text = Text("expected 1 to %(max_buckets)s weights, not %(count)s", max_buckets=MAX_BUCKETS, count=count)
        raise error_at(f"{place}.weights", text)
    if len(model.lengths) != len(LENGTHS):
        raise error_at(f"{place}.lengths", Text("expected %(number)s weights", number=len(LENGTHS)))
    if not all(math.isfinite(value) and abs(value) < 1e6 for value in (model.scale, model.bias, *model.lengths)):
        raise error_at(place, Text("expected numbers between -1,000,000 and 1,000,000"))
    if len(model.trained) > 200:
        raise error_at(f"{place}.trained", Text("expected at most 200 characters"))


@lru_cache(maxsize=256)
def _weights(text: str) -> array[int]:
    return array("b", base64.b64decode(text, validate=True))
