"""Rejection of new requests while the disk is almost full."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.gateway.admission import disk
from millrace.gateway.admission.disk import DiskWatch
from millrace.gateway.core.errors import ApiError
from tests.support.waiting import eventually_async


async def test_new_requests_are_rejected_while_the_disk_is_almost_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(disk, "CHECK_SECONDS", 0.01)
    watch = DiskWatch(tmp_path, min_free=1 << 60)
    assert watch.check() == "ok"
    await watch.start()
    try:
        with pytest.raises(ApiError) as exc_info:
            watch.require_space()
        assert (exc_info.value.status, exc_info.value.code) == (503, "server_is_overloaded")
        assert (b"retry-after", b"10") in exc_info.value.headers()
        assert "new requests are rejected until" in watch.check()
        watch._space.min_free = watch._space.resume_at = 1  # as if space had been freed

        async def has_space() -> bool:
            return watch.check() == "ok"

        await eventually_async(has_space)
        watch.require_space()
    finally:
        await watch.stop()
