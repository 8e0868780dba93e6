"""The progress output of `millrace up`: one line per step, with its duration."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from typing import TextIO

_TICK_SECONDS = 0.1
_PLAIN_INTERVAL = 0.25  # progress between two lines of a step, without a terminal
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class Step:
    """A running step. `done`, from 0 to 1, is shown if it is known."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.started_at = time.monotonic()
        self.done: float | None = None
        self.reported_done = 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started_at


class Progress:
    """The display of progress: a last line that is updated on a terminal, otherwise plain lines. Steps may overlap."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._is_terminal = self._out.isatty()
        self._ascii = not (self._out.encoding or "").lower().startswith("utf")
        self._steps: list[Step] = []
        self._frame = 0

    def print_line(self, text: str = "") -> None:
        """Print a line above the progress."""
        with contextlib.suppress(OSError):  # the disk is full or the terminal is closed; the platform continues
            self._clear()
            print(text, file=self._out, flush=True)

    def print_step(self, title: str, seconds: float) -> None:
        """Print a step that has ended."""
        self.print_line(f"  {'ok' if self._ascii else '✓'} {title:<44} {seconds:6.1f} s")

    @contextlib.asynccontextmanager
    async def step(self, title: str) -> AsyncIterator[Step]:
        """Show a step while the block runs, and print it with its duration at the end, unless it fails."""
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
            self.print_step(title, step.seconds)
        finally:
            ticker.cancel()

    async def _tick(self, step: Step) -> None:
        while True:
            if self._is_terminal:
                self._draw()
            elif step.done is not None and step.done >= step.reported_done + _PLAIN_INTERVAL and step.done < 1:
                step.reported_done = step.done
                self.print_line(f"    {step.title}: {step.done:.0%}")
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
        if self._is_terminal:
            self._out.write("\r\x1b[2K")
