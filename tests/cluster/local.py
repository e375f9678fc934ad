"""A cluster of the project's own, on a real Ray of two logical nodes of this machine.

Two of them run: `KeyedCluster` for most files, and `ImpatientCluster` for what takes minutes. Both
are fixtures of `conftest.py`. To start one takes longer than most tests, so each file has the
models that it needs by a reload: `cluster.serve(FAKE, ...)`.
"""

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pytest
import yaml

from logsteer import Client
from tests.conftest import ROOT, Configuration, fake_model, vllm_model
from tests.deploy.observed import FAIL
from tests.faults.keys import add_key
from tests.faults.processes import wait_for
from tests.held import held
from tests.ports import find_port

START_S = 240.0
ACTOR = "ray::ServeReplica:logsteer"
BEGUN_S = 1.0
"""For so long a job of several seconds has been at work in all actors when one is lost."""
CARDS = 10
"""So many cards in a row come from both ingresses, but for one time in five hundred."""
STEP_S = 0.05
HOLD = Path(tempfile.gettempdir()) / f"logsteer-hold-{os.getpid()}"
"""While this file exists, no step of FAKE ends."""
FAKE = fake_model(
    delay_s=STEP_S, ahead_tokens=60, reads_files=True, fail_id=FAIL, hold_file=str(HOLD)
) | {"replicas": 2}
"""A fake model that takes 60 tokens a step, with an actor on either node."""
SPREAD = FAKE | {"id": "spread", "tensor_parallel": 2, "nodes_per_replica": 2}
"""The same with the ranks of each replica on both nodes."""
WIDE = fake_model("wide") | {"tensor_parallel": 3, "nodes_per_replica": 3, "required": False}
"""A model that takes more nodes than there are."""
TENSOR, PIPELINE = (
    vllm_model(
        name,
        nodes_per_replica=2,
        memory="64MiB",
        adapter_slots=1,
        adapter_rank=8,
        **{f"{name}_parallel": 2},
    )
    for name in ("tensor", "pipeline")
)
"""The demo model on vLLM, with a rank on either node: four processes of 0.7 GiB each."""
METRICS_KEY = "to-scrape"
SILENT_S = 6.0
"""An engine that hangs, and an actor, is killed after so long on `ImpatientCluster`."""
LIMIT = 4
"""Requests at once of the key `few`."""
RATE = 1200
"""Tokens a minute of the key `slow`."""

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="SKIPPED BECAUSE RAY IS ABSENT: install the extra `ray`",
)

WITHOUT_ALL = "SKIPPED WITHOUT CLUSTER=all: `make test-cluster` runs what takes minutes"
IN_FULL = os.environ.get("CLUSTER") == "all"

needs_all = pytest.mark.skipif(
    not IN_FULL,
    reason=WITHOUT_ALL,
)


class LocalCluster:
    """`make cluster`'s process, and those below it.

    `key` goes with all requests, where there is one.
    """

    key: str | None = None

    def __init__(
        self,
        directory: Path,
        *models: Configuration,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self.config_path = directory / "models.yaml"
        # Each node has a disk of its own, and this between them.
        self._settings = {"cache_bytes": 0, "store_url": f"file://{directory}/store"} | settings
        self.write(*models)
        port = find_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = directory / "log"
        command = [sys.executable, "-m", "logsteer_server.cluster", "--ingresses", "2"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(port), "--config", str(self.config_path), *arguments],
                env=os.environ | dict(environment or {}),
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                start_new_session=True,
            )

    def write(self, *models: Configuration, **settings: Any) -> None:
        """Write the configuration that the next reload reads."""
        config = {"models": list(models)} | self._settings | settings
        self.config_path.write_text(yaml.safe_dump(config))

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while "Try:" not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)

    def find_actors(self, model: str = "fake") -> list[psutil.Process]:
        """The processes of a model's replicas, those that come and go included."""
        return self.find(rf"{ACTOR}-{model}-\w+:model-{model}")

    def find_own(self, deployment: str) -> list[psutil.Process]:
        """The processes of a deployment of the service's own application."""
        return self.find(f"{ACTOR}:{deployment}")

    def find(self, pattern: str) -> list[psutil.Process]:
        """The processes whose titles begin so; a title goes on with what the actor runs."""
        own = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in own if re.match(pattern, read_title(process))]

    # ------------------------------------------------------------------ what it is asked

    @property
    def headers(self) -> dict[str, str]:
        """What goes with each request."""
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}

    def request(
        self, method: str, path: str, timeout: float = 60.0, **others: Any
    ) -> httpx.Response:
        """The answer over a connection of its own: the proxy gives it to either ingress."""
        return httpx.request(
            method,
            f"{self.url}{path}",
            headers=self.headers,
            timeout=timeout,
            **others,
        )

    def client(self, model: str | None = None) -> Client:
        """A client whose requests go to this model, unless they name another."""
        return Client(self.url, api_key=self.key, model=model, max_retries=0, timeout=300)

    def ask(self, path: str, body: dict[str, Any], timeout: float = 120.0) -> dict[str, Any]:
        """The answer, which is to be one, without what differs from call to call."""
        return ask(self.url, path, body, timeout, self.headers)

    def read_card(self, model: str = "fake") -> dict[str, Any]:
        """A model as one of the ingresses sees it."""
        card: dict[str, Any] = self.request("GET", f"/models/{model}").json()
        return card

    def read_replicas(self, model: str = "fake") -> list[dict[str, Any]]:
        """The replicas as one of the ingresses sees them; none of a model that it does not know."""
        return list(self.read_card(model).get("replicas", ()))

    def wait_for_replicas(self, model: str, count: int = 1) -> None:
        """Wait until so many replicas of a model answer, by what every ingress knows."""
        deadline = time.monotonic() + START_S
        in_a_row = 0
        while in_a_row < CARDS:
            states = [own["state"] for own in self.read_replicas(model)]
            if states.count("ready") == count:
                in_a_row += 1
                continue
            in_a_row = 0
            assert time.monotonic() < deadline, f"{states}\n{self.output}"
            time.sleep(0.1)

    def reload(self, *models: Configuration, wait_s: float = 60.0) -> dict[str, Any]:
        """Have the configuration read again, with these models; what the answer says.

        It is asked for again for as long as an earlier change is at work.
        """
        self.write(*models)

        def post() -> httpx.Response | None:
            answer = self.request("POST", "/admin/reload", wait_s + 30, params={"wait_s": wait_s})
            return None if answer.status_code == httpx.codes.TOO_MANY_REQUESTS else answer

        answer = wait_for(post, 90)
        assert answer is not None
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    def serve(self, *models: Configuration) -> None:
        """Have these models and no others; all that are required answer then.

        One that runs as it should is left alone.
        """
        told = self.reload(*models, wait_s=0.0)
        for model in [own for own in models if own.get("required", True)]:
            # An ingress that was not asked for the reload may hear of a model later.
            state = wait_for(lambda name=model["id"]: self.read_card(name).get("state"))
            if state == "unloaded":  # a reload leaves it so
                assert self.request("POST", f"/models/{model['id']}/load").status_code == 200
            self.wait_for_replicas(model["id"], model.get("replicas", 1))
        if told["replaced"]:  # what was there before answers until its replacement does
            self.reload(*models)


class KeyedCluster(LocalCluster):
    """The cluster of all tests that need nothing else: two ingresses that ask for keys and share
    what keys may do and what was answered, a store that the nodes have between them, and metrics
    that Ray's agents show.
    """

    def __init__(self, directory: Path, **settings: Any) -> None:
        file = directory / "keys.json"
        self.keys = {
            "ann": add_key(file, "ann", "score", "steer", "write", "admin"),
            "few": add_key(file, "few", "score", concurrency=LIMIT),
            "slow": add_key(file, "slow", "score", tokens_per_minute=RATE),
        }
        self.key = self.keys["ann"]
        self.targets = directory / "targets.json"
        super().__init__(
            directory,
            FAKE,
            arguments=["--targets", str(self.targets)],
            environment={"RAY_metrics_report_interval_ms": "4000"},
            key_file="keys.json",
            metrics_key=METRICS_KEY,
            cache_bytes=2**20,
            cache_file="cache.sqlite",
            # Room for a job of 2,000 texts, and not for what a test sends at once.
            max_pending_tokens=60_000,
            max_key_share=1.0,
            **settings,
        )

    def connect(self, key: str) -> httpx.Client:
        """An HTTP client with one of the keys."""
        headers = {"Authorization": f"Bearer {self.keys[key]}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def read_metrics(self) -> str:
        """The metrics of the ingress that happens to answer."""
        headers = {"Authorization": f"Bearer {METRICS_KEY}"}
        return httpx.get(f"{self.url}/metrics", headers=headers, timeout=30).text

    def read_page(self) -> dict[str, float]:
        """The samples of the ingress that happens to answer."""
        lines = (line.rpartition(" ") for line in self.read_metrics().splitlines())
        return {name: float(value) for name, _, value in lines if name[:1] != "#" and name}


class ImpatientCluster(LocalCluster):
    """The cluster of faults: what is silent is killed soon, and what has no room is told soon. Its
    nodes share the directory of the store.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(
            directory,
            FAKE,
            # Half a minute otherwise until Serve says why it does not start something.
            environment={f"RAY_SERVE_SLOW_STARTUP_WARNING_{n}": "2" for n in ("S", "PERIOD_S")},
            heartbeat_timeout_s=SILENT_S,
            store_url=None,
            store_directory=str(directory / "store"),
        )


C = TypeVar("C", bound=LocalCluster)
T = TypeVar("T")


def ask(
    url: str,
    path: str,
    body: dict[str, Any],
    timeout: float = 120.0,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The answer of a service, without what differs from call to call."""
    call = f"{url}/{path}"
    response = httpx.post(call, json=body, timeout=timeout, headers=headers)
    assert response.status_code == 200, response.text
    return {name: value for name, value in response.json().items() if name not in ("id", "timing")}


@contextmanager
def running(found: C) -> Iterator[C]:
    """A cluster once it is ready; nothing is left of it afterwards."""
    try:
        found.wait_until_ready()
        yield found
    finally:
        assert found.process.poll() is None, found.output
        family = psutil.Process(found.process.pid).children(recursive=True)
        for own in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                if own.status() == psutil.STATUS_STOPPED:
                    own.send_signal(signal.SIGCONT)
        found.process.send_signal(signal.SIGINT)
        try:
            assert found.process.wait(60) == 0, found.output
            _, left = psutil.wait_procs(family, 60)
            assert not left
        finally:
            for own in family:
                if own.is_running():
                    own.kill()


def find_engines_below(actors: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The processes of the engines below actors; an actor that is gone has none."""
    found = []
    for actor in actors:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [own for own in actor.children() if "spawn_main" in read_title(own)]
    return found


def read_title(process: psutil.Process) -> str:
    """The command line of a process, which an actor overwrites; empty of one that is gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def lose_amid(
    job: Callable[[], T],
    lose: Callable[[], None],
    settle: Callable[[], None],
) -> T:
    """The answer of FAKE to a job of seconds, in the midst of which `lose` is called.

    `settle` waits until all is there again. A job that was over before, which may be on a busy
    machine, says nothing, and is followed by another.
    """
    for _ in range(3):
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(job)
            # Which ingress has it nobody tells: others are asked while that one is at work.
            time.sleep(BEGUN_S)
            with held(HOLD):
                time.sleep(BEGUN_S)  # in which steps that had ended are answered
                was_amid = not answer.done()
                lose()
            found = answer.result(120)
        settle()
        if was_amid:
            return found
    raise AssertionError("each job was over before anything was lost")


@contextmanager
def stopped(*processes: psutil.Process) -> Iterator[None]:
    """Have processes stand still, as SIGSTOP does."""
    for own in processes:
        os.kill(own.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for own in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(own.pid, signal.SIGCONT)
