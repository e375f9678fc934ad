"""Changes of models that are at work: one of each model at a time, of which the last one counts.

A reload that comes meanwhile is taken. A change that leads to what it wants of a model goes on; any
other is given up where it waits for a load, and the next one begins when it has ended:

    reload 1   a: B loads beside A ......... given up, B ends
    reload 2                                                 a: C loads beside A ... answers, A ends
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from logsteer_server.settings import ModelSettings, Settings

log = logging.getLogger(__name__)

T = TypeVar("T")
OTHERS = {"models", "directory"}
"""Settings that are no reason to start the server again."""


class ChangeError(Exception):
    """A change that could not be made; the message says why."""


class SupersededError(ChangeError):
    """A change that was given up for a later one of the same model."""

    def __init__(self) -> None:
        super().__init__("a later change of this model took its place")


@dataclass(slots=True)
class ReloadReport:
    """What a configuration that was read again changes: ids of models, names of settings.

    `pending` and `failed` also have models that it leaves as an earlier change has them.
    """

    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    pending: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    needs_restart: list[str] = field(default_factory=list)

    @property
    def by_kind(self) -> dict[str, list[str]]:
        """What a log tells of it, without what did not change."""
        named = ("added", "removed", "replaced", "needs_restart")
        return {name: found for name in named if (found := getattr(self, name))}


def compare_models(old: Mapping[str, ModelSettings], new: Iterable[ModelSettings]) -> ReloadReport:
    """Return which models are added, removed, replaced and left alone by other settings."""
    wanted = {model.id: model for model in new}
    return ReloadReport(
        added=[name for name in wanted if name not in old],
        removed=[name for name in old if name not in wanted],
        replaced=[name for name, own in wanted.items() if name in old and old[name] != own],
        unchanged=[name for name, own in wanted.items() if name in old and old[name] == own],
    )


def is_same_engine(old: ModelSettings, new: ModelSettings) -> bool:
    """Return whether settings differ at most in whether the model is required."""
    return old.model_copy(update={"required": new.required}) == new


def find_fixed(old: Settings, new: Settings) -> list[str]:
    """Return the settings of a configuration that are others, and count from the start on."""
    return [
        name
        for name in Settings.model_fields
        if name not in OTHERS and getattr(new, name) != getattr(old, name)
    ]


class Transition:
    """A change of one model, in a task of its own, that begins when `earlier` has ended.

    `aim` is what the model's settings are to be, None where it goes. `only_waits`: all is done, and
    it waits for the model to answer; who gives it up leaves the model as it is.
    """

    def __init__(
        self,
        model_id: str,
        aim: ModelSettings | None,
        work: "Work",
        earlier: "Transition | None" = None,
    ) -> None:
        self.model_id = model_id
        self.aim = aim
        self.only_waits = False
        self._given_up = asyncio.Event()
        self._reports: list[ReloadReport] = []
        self.task = asyncio.create_task(self._run(work, earlier))

    async def _run(self, work: "Work", earlier: "Transition | None") -> None:
        try:
            if earlier is not None:
                await asyncio.wait([earlier.task])
            self.check()
            await work(self)
        except SupersededError as error:
            self._note_failure(str(error))
            log.info("model %s: %s", self.model_id, error)
        except ChangeError as error:
            self._note_failure(str(error))
            log.error("model %s: %s", self.model_id, error)
        except Exception as error:  # whatever it is, reports are to say so, and the next one begins
            self._note_failure(f"the change ended with {error!r}")
            log.exception("model %s: a change broke", self.model_id)
        finally:
            for report in self._reports:
                report.pending.discard(self.model_id)

    def _note_failure(self, why: str) -> None:
        for report in self._reports:
            report.failed[self.model_id] = why

    def tell(self, report: ReloadReport) -> None:
        """Have a report say how this ends."""
        self._reports.append(report)
        report.pending.add(self.model_id)

    def give_up(self) -> None:
        """Have it end at its next wait, or where it already waits."""
        self._given_up.set()

    @property
    def is_given_up(self) -> bool:
        """Whether a later one waits for its end."""
        return self._given_up.is_set()

    def check(self) -> None:
        """Go on only if it was not given up. Errors: SupersededError."""
        if self.is_given_up:
            raise SupersededError

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what comes of work, which is cancelled if this is given up before it ends.

        Errors: SupersededError then; those of the work.
        """
        own = asyncio.create_task(work)
        over = asyncio.create_task(self._given_up.wait())
        try:
            await asyncio.wait([own, over], return_when=asyncio.FIRST_COMPLETED)
        finally:
            own.cancel()
            over.cancel()
            await asyncio.gather(own, over, return_exceptions=True)
        self.check()
        return own.result()


Work = Callable[[Transition], Coroutine[Any, Any, None]]


class Transitions:
    """The latest change of each model."""

    def __init__(self) -> None:
        self._latest: dict[str, Transition] = {}

    def begin(self, model_id: str, aim: ModelSettings | None, work: Work) -> Transition:
        """Begin a change of a model, after the end of one that is at work, which is given up."""
        if (earlier := self.find(model_id)) is not None:
            earlier.give_up()
        change = self._latest[model_id] = Transition(model_id, aim, work, earlier)
        return change

    def find(self, model_id: str) -> Transition | None:
        """Return the change of a model that is at work, if there is one."""
        change = self._latest.get(model_id)
        return None if change is None or change.task.done() else change

    @property
    def at_work(self) -> list[Transition]:
        """The changes that have not ended, one of each model."""
        return [change for name in self._latest if (change := self.find(name)) is not None]

    def is_busy(self, model_id: str) -> bool:
        """Return whether a change of a model is at work that does more than wait for an answer."""
        change = self.find(model_id)
        return change is not None and not change.only_waits

    def take(
        self, there: Mapping[str, ModelSettings], wanted: Iterable[ModelSettings], work: Work
    ) -> tuple[ReloadReport, list[Transition]]:
        """Begin the changes that lead to a configuration; return what they are, and all at work.

        `there` are the models as they are; those that are being changed count as what they become.
        Where a model differs only in whether it is required, that is left to the caller.
        """
        models = {model.id: model for model in wanted}
        working = {change.model_id: change for change in self.at_work}
        becomes = {**there, **{name: change.aim for name, change in working.items()}}
        old = {name: own for name, own in becomes.items() if own is not None}
        report = compare_models(old, models.values())
        for model_id in (*report.added, *report.removed):
            self.begin(model_id, models.get(model_id), work)
        for model_id in report.replaced:
            if not is_same_engine(old[model_id], models[model_id]):
                self.begin(model_id, models[model_id], work)
            elif model_id in working:
                working[model_id].aim = models[model_id]
        changes = self.at_work
        for change in changes:
            change.tell(report)
        return report, changes

    def close(self) -> None:
        """Cancel all of them, as the process ends."""
        for change in self._latest.values():
            change.task.cancel()


async def wait_for_ends(changes: Iterable[Transition], limit_s: float) -> None:
    """Wait for the end of changes, which go on afterwards, for so long; at least one step."""
    await asyncio.sleep(0)
    if limit_s and (tasks := [change.task for change in changes]):
        await asyncio.wait(tasks, timeout=limit_s)
