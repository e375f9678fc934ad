"""The Ray Serve applications of models, one each, so that a change of one leaves others alone."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from ray import serve

from logsteer_server.cluster.absence import Absence, find_cause
from logsteer_server.cluster.wanted import PREFIX
from logsteer_server.models.fit import fits_beside
from logsteer_server.models.transitions import ChangeError
from logsteer_server.settings import ModelSettings, Settings

log = logging.getLogger(__name__)

POLL_S = 0.2
LOST = "HEALTH_CHECK_FAILED"
"""Why a deployment is not healthy of which an actor was up, and is lost."""


class AbsenceError(ChangeError):
    """A model's actors do not come up. `may_pass`: they may if that is tried again later."""

    def __init__(self, absence: Absence) -> None:
        super().__init__(absence.detail)
        self.may_pass = absence.may_pass


class ModelApplications:
    """Deploys, watches and ends the application of each model.

    `make` returns a model's application, `name` its name, and `measure` the CPUs and GPUs that Ray
    sets aside for one replica on each of its nodes.
    """

    def __init__(
        self,
        settings: Settings,
        make: Callable[[ModelSettings], Any],
        name: Callable[[ModelSettings], str],
        measure: Callable[[ModelSettings], tuple[float, float]],
    ) -> None:
        self.name = name
        self._settings = settings
        self._make = make
        self._measure = measure

    async def list(self) -> set[str]:
        """Return the names of the applications that are there."""
        status = await asyncio.to_thread(serve.status)
        return {name for name in status.applications if name.startswith(PREFIX)}

    async def deploy(self, model: ModelSettings) -> None:
        """Have Serve start a model's actors; returns before they are there."""
        target = serve.RunTarget(target=self._make(model), name=self.name(model), route_prefix=None)
        await asyncio.to_thread(
            serve.run_many,
            [target],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    async def end(self, name: str) -> None:
        """End an application's actors, which answer what they have, and free what they held."""
        await asyncio.to_thread(serve.delete, name)

    async def settle(self, model: ModelSettings) -> None:
        """Wait until all of a model's actors answer. Errors: AbsenceError where they do not."""
        limit_s, began = self._settings.max_load_s, time.monotonic()
        name = self.name(model)
        while limit_s is None or time.monotonic() < began + limit_s:
            status = await asyncio.to_thread(serve.status)
            found = status.applications.get(name)
            if found is None:
                raise AbsenceError(Absence("its application was deleted from Serve"))
            if found.status == "RUNNING":
                return
            # After a failed health check of one that was up, Serve starts another by itself.
            lost = any(own.status_trigger == LOST for own in found.deployments.values())
            if found.status == "DEPLOY_FAILED" and not lost:
                told = "\n".join(own.message for own in found.deployments.values())
                told = told.strip() or found.message.strip() or "its actors did not start"
                raise AbsenceError(find_cause(told, model.nodes_per_replica) or Absence(told))
            await asyncio.sleep(POLL_S)
        why = f"its actors were not up after {limit_s:g} s (max_load_s): `ray status` shows what "
        raise AbsenceError(Absence(f"{why}they wait for"))

    def fits_beside(self, old: ModelSettings, wanted: ModelSettings) -> bool:
        """Return whether the new one may be started while the old one runs, as `reload_beside`
        says; `auto`: if Ray has CPUs and GPUs left, and on CPUs this node the memory.
        """
        if self._settings.reload_beside != "auto":
            return self._settings.reload_beside == "always"
        free = ray.available_resources()
        count = wanted.replicas * wanted.nodes_per_replica
        cpus, gpus = (count * number for number in self._measure(wanted))
        if cpus > free.get("CPU", 0) or gpus > free.get("GPU", 0):
            return False
        return gpus > 0 or fits_beside(old, wanted, self._settings)
