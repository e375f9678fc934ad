"""Progress on stderr: of a text, first bytes sent, then windows; and of prompts, texts, rows."""

import os
from collections.abc import Iterable
from typing import Any, BinaryIO, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from logsteer.schemas import WindowEvent
from logsteer.schemas.perplexity import StreamStart


class _Bars(Progress):
    """Bars on stderr for as long as the context lasts, drawn only on a terminal where wanted."""

    def __init__(self, *columns: ProgressColumn, wanted: bool = True) -> None:
        console = Console(stderr=True)
        hidden = not (wanted and console.is_terminal)
        super().__init__(
            *columns, TimeElapsedColumn(), console=console, disable=hidden, transient=True
        )


class ScoringProgress(_Bars):
    """Two bars, drawn only where stderr is a terminal; `source` is the file, counted as it is read.

    The file is not closed.
    """

    def __init__(self, source: BinaryIO | Iterable[bytes]) -> None:
        super().__init__(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}")
        )
        size = _size(source)
        self._sent = self.add_task("sending", total=size, note="")
        self._scored = self.add_task("scoring", total=None, note="", start=False)
        self._tokens = 0
        # rich counts a file whose size it knows; a pipe's bar only shows that something moves.
        self.source = source
        if size is not None:
            file = cast(BinaryIO, source)
            self.source = self.wrap_file(file, total=size, task_id=self._sent)

    def show(self, event: StreamStart | WindowEvent) -> None:
        """Show what the event says."""
        if isinstance(event, StreamStart):
            self.start_task(self._scored)
            return
        self._tokens += event.window.num_scored
        elapsed = self.tasks[self._scored].elapsed
        rate = f"  {self._tokens / elapsed:,.0f} tokens/s" if elapsed else ""
        perplexity = "" if event.perplexity is None else f"  perplexity {event.perplexity:.4g}"
        self.update(
            self._scored,
            completed=event.windows_done,
            total=event.windows_total,
            note=f"{self._tokens:,} tokens{rate}{perplexity}",
        )


class CountingProgress(_Bars):
    """A bar of what is done, drawn only where it is wanted and stderr is a terminal.

    `title` says what is done; `done` of `total` are at the beginning.
    """

    def __init__(self, title: str, total: int, done: int, wanted: bool) -> None:
        note = TextColumn("{task.fields[note]}")
        super().__init__(TextColumn(title), BarColumn(), TaskProgressColumn(), note,
                         TimeRemainingColumn(), wanted=wanted)  # fmt: skip
        self._task = self.add_task(title, total=total, completed=done, note="")

    def count(self, more: int) -> None:
        """Count so many more as done."""
        self.advance(self._task, more)

    def show(self, done: int, note: str) -> None:
        """Show that so many are done, and a note beside the bar."""
        self.update(self._task, completed=done, note=note)


class Waiting(_Bars):
    """A sign of life for one long request, drawn only where stderr is a terminal."""

    def __init__(self, title: str) -> None:
        super().__init__(SpinnerColumn(), TextColumn("{task.description}"))
        self.add_task(title, total=None)


def _size(source: Any) -> int | None:
    try:
        return os.fstat(source.fileno()).st_size or None
    except (AttributeError, OSError):
        return None
