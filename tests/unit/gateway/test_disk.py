"""New requests are refused while the disk is almost full, and taken again when it is not."""

from __future__ import annotations

import dataclasses

import pytest

from millrace.conf.environment import platform_settings
from millrace.gateway.admission import disk
from millrace.gateway.admission.disk import DiskWatch
from millrace.gateway.core.errors import ApiError
from tests.support.gateway.replica import eventually


async def test_it_refuses_while_the_disk_is_almost_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "CHECK_SECONDS", 0.01)
    watch = DiskWatch(dataclasses.replace(platform_settings(), min_free_disk=1 << 60))
    assert watch.check() == "ok"
    await watch.start()
    try:
        with pytest.raises(ApiError) as caught:
            watch.require_space()
        assert (caught.value.status, caught.value.code) == (503, "server_is_overloaded")
        assert (b"retry-after", b"10") in caught.value.headers()
        assert "new requests are rejected until" in watch.check()
        watch._space.min_free = watch._space.resume_at = 1  # as if space had been freed

        async def has_space() -> bool:
            return watch.check() == "ok"

        await eventually(has_space)
        watch.require_space()
    finally:
        await watch.stop()
