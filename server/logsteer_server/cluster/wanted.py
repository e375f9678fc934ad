"""Which models a cluster has, and how: what the coordinator decides, and all ingresses follow."""

import hashlib
import json
import pickle
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import BaseModel
from ray.experimental import internal_kv

from logsteer_server.settings import ModelSettings, Settings

SERVICE = "logsteer"
"""The application of ingresses and coordinator, where `python -m` deploys it."""
PREFIX = "logsteer-"
"""What the names of models' applications begin with."""
BEING_REPLACED = "it is being replaced"
"""Detail of a model that ends for one of other settings."""
KEY, NAMESPACE = "wanted-models", "logsteer"
"""Where it is kept in Ray's own store, which lives as long as Serve's."""
OF_MODELS = {"models", "directory"}


@dataclass(frozen=True, slots=True)
class WantedModel:
    """One model: `detail` says why it does not run, `note` what is to be known beside its state.

    One that failed and `may_pass` is started again after a while.
    """

    settings: ModelSettings
    state: Literal["running", "draining", "unloaded", "failed"] = "running"
    detail: str = ""
    note: str = ""
    may_pass: bool = False

    @property
    def has_engine(self) -> bool:
        """Whether actors run for it."""
        return self.state in ("running", "draining")

    @property
    def is_replaced(self) -> bool:
        """Whether it has ended for one of other settings, which does not answer yet."""
        return self.state == "unloaded" and self.detail == BEING_REPLACED


@dataclass(frozen=True, slots=True)
class WantedModels:
    """All models, by id and in the order of the configuration; revisions only grow.

    `born` names the deployment of the service that they belong to.
    """

    born: str
    revision: int
    by_id: dict[str, WantedModel]

    def change(self, by_id: dict[str, WantedModel]) -> "WantedModels":
        """Return the next revision, with these models and no others."""
        return replace(self, revision=self.revision + 1, by_id=by_id)


class KeptState:
    """What is wanted, in Ray's own store: an actor that is started again goes on with it."""

    def read(self) -> WantedModels | None:
        """Return what was kept last, if anything was."""
        found = internal_kv._internal_kv_get(KEY, namespace=NAMESPACE)
        return None if found is None else pickle.loads(found)  # noqa: S301 - written by us alone

    def write(self, wanted: WantedModels) -> None:
        """Keep what is wanted from now on."""
        internal_kv._internal_kv_put(KEY, pickle.dumps(wanted), namespace=NAMESPACE)


def name_application(model: ModelSettings, settings: Settings, arguments: BaseModel) -> str:
    """Return the name of the application of a model, by all that its actors depend on.

    So a model of other settings is another application, which comes up beside the one of before.
    """
    found = [
        model.model_dump(mode="json", exclude={"required"}),
        settings.model_dump(mode="json", exclude=OF_MODELS),
        arguments.model_dump(mode="json"),
    ]
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    return f"{PREFIX}{model.id}-{digest[:12]}"
