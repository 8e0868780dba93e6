"""What `millrace up` says while it works: one line a step, with the time it took."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from typing import TextIO

_TICK_SECONDS = 0.1
_PLAIN_EVERY = 0.25  # of a step whose progress is known, in a pipe
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class Step:
    """A step under way. `done` of 0 to 1, if known, is shown."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.began = time.monotonic()
        self.done: float | None = None
        self.said = 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


class Progress:
    """On a terminal a last line that moves, elsewhere plain lines; steps may overlap."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._lively = self._out.isatty()
        self._ascii = not (self._out.encoding or "").lower().startswith("utf")
        self._steps: list[Step] = []
        self._frame = 0

    def say(self, text: str = "") -> None:
        """Print a line above the progress."""
        with contextlib.suppress(OSError):  # a file on a full disk, a terminal that is gone: the platform runs on
            self._clear()
            print(text, file=self._out, flush=True)

    @contextlib.asynccontextmanager
    async def step(self, title: str) -> AsyncIterator[Step]:
        """Show a step while the block runs, and that it is done after; a step that fails is left unticked."""
        step = Step(title)
        self._steps.append(step)
        ticker = asyncio.create_task(self._tick(step))
        try:
            yield step
        except BaseException:
            self._steps.remove(step)
            self._clear()
            raise
        else:
            self._steps.remove(step)
            self.say(f"  {'ok' if self._ascii else '✓'} {title:<44} {step.seconds:6.1f} s")
        finally:
            ticker.cancel()

    async def _tick(self, step: Step) -> None:
        while True:
            if self._lively:
                self._draw()
            elif step.done is not None and step.done >= step.said + _PLAIN_EVERY and step.done < 1:
                step.said = step.done
                self.say(f"    {step.title}: {step.done:.0%}")
            await asyncio.sleep(_TICK_SECONDS)

    def _draw(self) -> None:
        self._frame += 1
        frame = "-" if self._ascii else _FRAMES[self._frame % len(_FRAMES)]
        parts = [
            step.title + (f" {step.done:.0%}" if step.done is not None else "") + f" {step.seconds:.0f} s"
            for step in self._steps
        ]
        self._out.write(f"\r\x1b[2K  {frame} {', '.join(parts)[:110]}")
        self._out.flush()

    def _clear(self) -> None:
        if self._lively:
            self._out.write("\r\x1b[2K")
