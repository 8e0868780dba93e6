"""Questions with their answers in PostgreSQL, for the semantic cache. A statement sees the rows of one tenant.

A lookup reads the vectors of all entries of its scope, which are at most `MAX_SCOPE_ENTRIES`, and compares them
exactly. Questions and answers are encrypted (answer_cipher.py); vectors are not.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millrace.apps.answer_caches.semantic_decision import BAND_STARTS, Evidence
from millrace.gateway.answer_cache.answer_cipher import AnswerCipher
from millrace.gateway.answer_cache.answer_store import (
    MAX_ANSWER_BYTES,
    CachedAnswer,
    decode_answer,
    encode_answer,
)
from millrace.gateway.core.request_db import TenantConnectionPool

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]

MAX_SCOPE_ENTRIES = 1000  # the oldest question makes room for a new one
MAX_TENANT_ENTRIES = 20_000
COMPARED_ANSWERS = 8  # nearest entries with which a new answer is compared
SCOPE_BYTES = 16

_EVIDENCE = """
SELECT band, correct, wrong FROM request_log_semanticevidence WHERE tenant_id = %(tenant)s AND embedding = %(embedding)s
"""
_VECTORS = """
SELECT string_agg(vector, ''::bytea ORDER BY id) AS vectors, array_agg(id ORDER BY id) AS ids,
    array_agg(answer_group ORDER BY id) AS groups, array_agg(wrong ORDER BY id) AS wrong
FROM (SELECT id, vector, answer_group, wrong FROM request_log_semanticentry
    WHERE tenant_id = %(tenant)s AND scope = %(scope)s AND expires_at > now() AND octet_length(vector) = %(bytes)s
    ORDER BY id DESC LIMIT %(most)s) e
"""
_ENTRY = """
SELECT id, answer_group, answer_digest, answer_vector, request_id, question, answer
FROM request_log_semanticentry WHERE tenant_id = %(tenant)s AND id = %(id)s AND expires_at > now()
"""
_ANSWERS = """
SELECT answer_group, answer_digest, answer_vector FROM request_log_semanticentry
WHERE tenant_id = %(tenant)s AND id = ANY(%(ids)s)
"""
# An equal question replaces the earlier one. Bounds are restored in the same transaction.
_INSERT = """
INSERT INTO request_log_semanticentry (tenant_id, scope, question_digest, vector, answer_digest, answer_vector,
    answer_group, request_id, question, answer, created_at, expires_at)
VALUES (%(tenant)s, %(scope)s, %(question_digest)s, %(vector)s, %(answer_digest)s, %(answer_vector)s, %(group)s,
    %(request_id)s, %(question)s, %(answer)s, now(), now() + make_interval(secs => %(seconds)s))
ON CONFLICT (tenant_id, scope, question_digest) DO UPDATE SET (vector, answer_digest, answer_vector, answer_group,
    request_id, question, answer, created_at, expires_at, wrong) = (excluded.vector, excluded.answer_digest,
    excluded.answer_vector, excluded.answer_group, excluded.request_id, excluded.question, excluded.answer,
    excluded.created_at, excluded.expires_at, 0)
"""
_TRIM = """
DELETE FROM request_log_semanticentry WHERE tenant_id = %(tenant)s AND id IN (
    (SELECT id FROM request_log_semanticentry WHERE tenant_id = %(tenant)s AND scope = %(scope)s
        ORDER BY id DESC OFFSET %(scope_entries)s)
    UNION ALL (SELECT id FROM request_log_semanticentry WHERE tenant_id = %(tenant)s
        ORDER BY id DESC OFFSET %(tenant_entries)s))
"""
_CHECK = """
INSERT INTO request_log_semanticevidence AS e (tenant_id, embedding, band, correct, wrong, updated_at)
VALUES (%(tenant)s, %(embedding)s, %(band)s, %(correct)s, %(wrong)s, now())
ON CONFLICT (tenant_id, embedding, band) DO UPDATE
SET correct = e.correct + excluded.correct, wrong = e.wrong + excluded.wrong, updated_at = excluded.updated_at
"""
_WRONG = "UPDATE request_log_semanticentry SET wrong = wrong + 1 WHERE tenant_id = %(tenant)s AND id = %(id)s"


@dataclass(frozen=True)
class Answer:
    """An answer in the forms in which answers are compared."""

    digest: bytes  # keyed, of the normalized text
    vector: bytes  # float16; empty: the answer is too long


@dataclass(frozen=True)
class CachedQuestion:
    """A cached question with its answer."""

    id: int
    group: int
    compared: Answer
    request_id: str
    question: str
    answer: CachedAnswer


@dataclass(frozen=True)
class ScopeEntries:
    """The vectors of a scope's entries, and the tenant's evidence at the same time."""

    vectors: Vector
    ids: Sequence[int]
    groups: Sequence[int]
    wrong: Sequence[int]
    evidence: Evidence


class SemanticStore:
    """The entries and the evidence of all tenants."""

    def __init__(self, database: TenantConnectionPool, cipher: AnswerCipher) -> None:
        self._database = database
        self._cipher = cipher

    def scope_id(self, parts: object) -> bytes:
        """Return the identity of what must be equal for two requests to be similar."""
        return self._cipher.digest(b"semantic scope\0" + encode_answer(parts))[:SCOPE_BYTES]

    def answer_digest(self, text: str) -> bytes:
        """Return the digest of an answer's text. Case, spaces and the form of characters do not matter."""
        normalized = " ".join(unicodedata.normalize("NFKC", text).casefold().split()).rstrip(".!")
        return self._cipher.digest(b"semantic answer\0" + normalized.encode("utf-8", "surrogatepass"))[:SCOPE_BYTES]

    async def read_scope(self, tenant_id: int, scope: bytes, embedding: str, size: int) -> ScopeEntries:
        """Return the entries of a scope whose vectors have this size.

        Raises:
            ApiError: 503, the database cannot be reached.
        """
        fields = {"tenant": tenant_id, "scope": scope, "embedding": embedding, "most": MAX_SCOPE_ENTRIES}
        fields["bytes"] = 2 * size
        async with self._database.tenant_transaction(tenant_id) as connection, connection.cursor(binary=True) as cursor:
            await cursor.execute(_EVIDENCE, fields)
            evidence = read_evidence((row["band"], row["correct"], row["wrong"]) for row in await cursor.fetchall())
            await cursor.execute(_VECTORS, fields)
            row: Any = await cursor.fetchone()
        import numpy as np  # 14 MB in a gateway whose tenants receive no semantic hits

        vectors = np.frombuffer(row["vectors"] or b"", np.float16).astype(np.float32).reshape(-1, size)
        return ScopeEntries(vectors, row["ids"] or (), row["groups"] or (), row["wrong"] or (), evidence)

    async def read_entry(self, tenant_id: int, scope: bytes, entry_id: int) -> CachedQuestion | None:
        """Return an entry; None if it has expired or cannot be decrypted."""
        async with self._database.tenant_transaction(tenant_id) as connection, connection.cursor(binary=True) as cursor:
            await cursor.execute(_ENTRY, {"tenant": tenant_id, "id": entry_id})
            row: Any = await cursor.fetchone()
        if row is None:
            return None
        question = self._cipher.open(tenant_id, b"question\0" + scope, row["question"])
        payload = self._cipher.open(tenant_id, b"answer\0" + scope, row["answer"])
        answer = None if payload is None else decode_answer(payload)
        if question is None or answer is None:
            return None
        compared = Answer(row["answer_digest"], row["answer_vector"])
        return CachedQuestion(row["id"], row["answer_group"], compared, row["request_id"], json.loads(question), answer)

    async def read_answers(self, tenant_id: int, ids: Sequence[int]) -> list[tuple[int, Answer]]:
        """Return the groups of entries with their answers."""
        async with self._database.tenant_transaction(tenant_id) as connection, connection.cursor(binary=True) as cursor:
            await cursor.execute(_ANSWERS, {"tenant": tenant_id, "ids": list(ids)})
            rows = await cursor.fetchall()
        return [(row["answer_group"], Answer(row["answer_digest"], row["answer_vector"])) for row in rows]

    async def add(
        self,
        tenant_id: int,
        scope: bytes,
        question: str,
        vector: Vector,
        compared: Answer,
        group: int,
        answer: CachedAnswer,
        seconds: int,
    ) -> bool:
        """Store a question with its answer. Return False if the answer is too long."""
        payload = encode_answer(answer)
        if len(payload) > MAX_ANSWER_BYTES:
            return False
        text = json.dumps(question).encode()
        fields = {
            "tenant": tenant_id,
            "scope": scope,
            "question_digest": self._cipher.digest(b"semantic question\0" + text)[:SCOPE_BYTES],
            "vector": vector.astype("float16").tobytes(),
            "answer_digest": compared.digest,
            "answer_vector": compared.vector,
            "group": group,
            "request_id": answer.request_id,
            "question": self._cipher.seal(tenant_id, b"question\0" + scope, text),
            "answer": self._cipher.seal(tenant_id, b"answer\0" + scope, payload),
            "seconds": seconds,
            "scope_entries": MAX_SCOPE_ENTRIES,
            "tenant_entries": MAX_TENANT_ENTRIES,
        }
        async with self._database.tenant_transaction(tenant_id) as connection:
            await connection.execute(_INSERT, fields)
            await connection.execute(_TRIM, fields)
        return True

    async def add_check(
        self, tenant_id: int, embedding: str, band: int, entry_id: int, *, is_correct: bool, is_hit: bool
    ) -> None:
        """Add a check to the evidence. A wrong hit lowers its entry in the same transaction."""
        fields = {"tenant": tenant_id, "embedding": embedding, "band": band, "id": entry_id}
        fields |= {"correct": int(is_correct), "wrong": int(not is_correct)}
        async with self._database.tenant_transaction(tenant_id) as connection:
            await connection.execute(_CHECK, fields)
            if is_hit and not is_correct:
                await connection.execute(_WRONG, fields)


def read_evidence(rows: Any) -> Evidence:
    """Return the evidence of rows (band, correct, wrong)."""
    evidence = Evidence()
    for number, correct, wrong in rows:
        if number < len(BAND_STARTS):
            evidence.bands[number].correct, evidence.bands[number].wrong = correct, wrong
    return evidence
