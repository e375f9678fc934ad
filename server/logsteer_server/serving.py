"""`logsteer-server`: start the service, show how the models come up, and say how to ask them."""

import argparse
import asyncio
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.datastructures import State
from starlette.types import ASGIApp
from uvicorn.loops.auto import auto_loop_factory

from logsteer.schemas import ModelCard
from logsteer_server import __version__
from logsteer_server.api.connections import LimitedProtocol
from logsteer_server.api.gate import Drain
from logsteer_server.app import create_app
from logsteer_server.engines.vllm.arguments import check_arguments, check_devices
from logsteer_server.engines.weights import check_path
from logsteer_server.flags import ServerParser, add_settings, add_vllm_flags, read_settings
from logsteer_server.keys.keyring import check_key_file
from logsteer_server.listening import (
    check_exposure,
    is_loopback,
    open_listener,
    raise_descriptor_limit,
)
from logsteer_server.models.fit import describe_fit
from logsteer_server.models.registry import ModelRegistry
from logsteer_server.observation.logs import LogStyle, configure_logs
from logsteer_server.settings import (
    MODEL_TOPICS,
    SERVER_TOPICS,
    ConfigurationError,
    ModelSettings,
    Settings,
    load_settings,
    name_models,
)
from logsteer_server.stores.objects import Objects, check_store_directory

log = logging.getLogger(__name__)

GIVEN_UP = 3
"""Exit status where a required model was given up."""
END_S = 5
"""Time to answer that the server ends, once the time of running requests is over. A request that
still waits then, for example for the rest of its body, is cancelled, and answered so, too."""
OWN_DESCRIPTORS = 256
"""Descriptors left for engines, stores and uploads."""
PROGRESS_EVERY_S = 5.0
YOUNG_OBJECTS = 20_000
"""Objects that Python's collector looks at together: those of a few large requests.

At its default of 700 it looks at the same unanswered requests again and again.
"""
IDLE_CONNECTION_S = 60
"""Longer than clients keep an idle connection, which is 5 s in httpx: who closes it while the other
sends costs a request."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line's arguments."""
    parser = ServerParser(
        prog="logsteer-server",
        description="Keep language models resident and score text with them.",
        epilog="To change keys: `logsteer-server keys --help`.",
        usage="%(prog)s [options] [MODEL ...]",
        allow_abbrev=False,
    )
    models = parser.add_mutually_exclusive_group()
    models.add_argument(
        "models", metavar="MODEL", nargs="*", default=[],
        help="a directory, a GGUF file, or an id of the hub; several take the same settings",
    )  # fmt: skip
    models.add_argument("--demo", action="store_true", help="serve the demo model")
    models.add_argument("--config", type=Path, help="YAML file that lists the models")
    parser.add_argument(
        "--check",
        action="store_true",
        help="validate the configuration, say what its models need of this machine, and exit",
    )
    add_settings(parser, ModelSettings, MODEL_TOPICS)
    add_vllm_flags(parser)
    add_settings(parser, Settings, SERVER_TOPICS)
    parser.add_argument("--version", action="version", version=__version__)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the server until it is interrupted; return the exit status.

    0 after a signal, 1 where the start failed, 2 for an unusable configuration, 3 where a required
    model was given up; 128 and its number after a second signal.
    """
    try:
        return _run(parse_arguments(argv))
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    """Do what the command line asks for; return the exit status. Errors: ConfigurationError."""
    reread = partial(read_named, arguments)
    settings = reread()
    check_places(settings)
    if arguments.check:
        models = ", ".join(f"{model.id} ({model.engine})" for model in settings.models)
        print(f"The configuration is valid. Models: {models}.")
        for line in examine_machine(settings):
            print(line)
        return 0
    style = LogStyle(settings.log_format, settings.log_level)
    configure_logs(style, access=settings.access_log)
    listener = open_listener(settings)
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        status, last_words = runner.run(_serve(settings, listener, reread))
    if last_words:
        log.critical(last_words)
    return status


def examine_machine(settings: Settings) -> Iterator[str]:
    """Yield what each model needs of this machine, and a warning for each thing that it lacks."""
    yield from describe_fit(settings)
    objects = Objects.open(settings)
    if not objects.is_local:
        objects.probe()
        trouble = objects.trouble
        yield f"warning: store_url: {trouble}" if trouble else "store_url: it answers"
    if settings.uds is None:
        try:
            open_listener(settings).close()
        except ConfigurationError as error:
            yield f"warning: {error}"


def read_named(arguments: argparse.Namespace) -> Settings:
    """Read what the command line names. Errors: ConfigurationError."""
    names = ["demo"] if arguments.demo else arguments.models
    given = read_settings(arguments, ModelSettings)
    if given and not names:
        detail = f"{', '.join(given)}: these are settings of MODEL; set them under `models:`"
        raise ConfigurationError(f"{detail} of {arguments.config or 'a file'}, or name a MODEL")
    try:
        for name in names:
            check_path(name)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    settings = load_settings(
        arguments.config,
        name_models(names, given, arguments.revision or ""),
        **{k: v for k, v in read_settings(arguments, Settings).items() if k != "models"},
    )
    check_vllm_arguments(settings)
    for model in settings.models:
        if model.max_replicas is not None:
            detail = "max_replicas takes a Ray cluster: give replicas, or serve on Ray"
            raise ConfigurationError(f"model {model.id}: {detail}")
    return settings


def check_places(settings: Settings) -> None:
    """Make sure that the files that are named can serve, and that strangers are kept out.

    Errors: ConfigurationError.
    """
    check_store_directory(settings)
    check_key_file(settings)
    check_exposure(settings)


def check_vllm_arguments(settings: Settings) -> None:
    """Refuse arguments of vLLM's that break the service, and devices that it would not use.

    Errors: ConfigurationError.
    """
    for model in settings.models:
        try:
            if model.engine == "vllm":
                check_arguments(model.engine_args)
                ranks = model.tensor_parallel * model.pipeline_parallel
                check_devices(model.devices, ranks * model.replicas)
        except ValueError as error:
            raise ConfigurationError(f"model {model.id}: {error}") from error


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which lets requests finish before it closes its socket.

    The first signal, or a required model that was given up, begins that; it ends with the last
    request, or when its time is over. A second signal ends the process at once.
    """

    def __init__(self, config: uvicorn.Config, state: State, settings: Settings) -> None:
        super().__init__(config)
        self.status = 0
        self.last_words = ""
        self._drain: Drain = state.drain
        self._state = state
        self._settings = settings
        self._is_interrupted = False
        self._deadline = 0.0

    def handle_exit(self, sig: int, _frame: FrameType | None) -> None:
        """Take a signal."""
        if self._is_interrupted:
            os._exit(128 + sig)  # engines die with this process
        self._is_interrupted = True

    async def on_tick(self, counter: int) -> bool:
        """Return whether to close the socket now; called ten times a second."""
        if await super().on_tick(counter):
            return True
        if not self._drain.has_begun:
            models: ModelRegistry = self._state.models
            given_up = models.find_given_up() if self._settings.exit_when_given_up else None
            if given_up is not None:
                self.status = GIVEN_UP
                self.last_words = (
                    f"The required model {given_up.id} was given up, so the server has ended: "
                    f"{given_up.handle.detail}"
                )
            if given_up is not None or self._is_interrupted:
                self._drain.has_begun = True
                self._deadline = time.monotonic() + self._settings.drain_s
            return False
        if self._drain.num_running == 0 or self._drain.has_ended:
            return True
        if time.monotonic() >= self._deadline:
            log.warning("%d requests did not end in time", self._drain.num_running)
            self._drain.has_ended = True
            self._state.models.stop()
        return False


def configure_server(settings: Settings, app: ASGIApp, end_s: float = END_S) -> uvicorn.Config:
    """Return how uvicorn is to serve an application: with the bounds of connections."""
    most = min(settings.max_connections, raise_descriptor_limit() - OWN_DESCRIPTORS)
    limits = {"max_connections": max(1, most), "stall_timeout_s": settings.stall_timeout_s}
    return uvicorn.Config(
        app,
        http=partial(LimitedProtocol, **limits),  # type: ignore[arg-type]
        log_config=None,  # its lines are written as all others
        log_level="error",  # it warns of each request that is none, which strangers may send
        access_log=False,
        timeout_keep_alive=IDLE_CONNECTION_S,
        timeout_graceful_shutdown=max(1, round(end_s)),
    )


async def _serve(
    settings: Settings, listener: socket.socket, reread: Callable[[], Settings]
) -> tuple[int, str]:
    """Serve until the end; return the exit status and what is to be logged last.

    Errors: ConfigurationError.
    """
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    app = create_app(settings, reread)
    server = DrainingServer(configure_server(settings, app), app.state, settings)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        if settings.uds is None:
            host, port = listener.getsockname()[:2]
            url = f"http://{host}:{port}"
        else:
            url = f"unix://{settings.uds.absolute()}"
        needs_key = app.state.keys.needs_key
        if not needs_key and settings.uds is None and not is_loopback(settings.host):
            log.warning("INSECURE: anyone who reaches %s can use it without a key", url)
        loop = asyncio.get_running_loop()
        log.debug("requests are served on a loop of %s", type(loop).__module__)
        reporting = report_start(app.state.models, url, needs_key, settings.log_format == "json")
        report = asyncio.create_task(reporting)
        await serving
        report.cancel()
        await asyncio.gather(report, return_exceptions=True)
    return (server.status, server.last_words) if server.started else (1, "")


async def report_start(
    models: ModelRegistry, url: str, needs_key: bool, to_log: bool = False
) -> None:
    """Print how each model comes up, and what to ask once all of them have; or log the former."""

    def say(text: str, level: int = logging.INFO) -> None:
        if to_log:
            log.log(level, "%s", text.strip())
        else:
            print(text, file=sys.stderr if level >= logging.ERROR else sys.stdout, flush=True)

    started = time.monotonic()
    say(f"logsteer {__version__} listens on {url}; models are loading.")
    waiting = dict(models.by_id)
    last_report = started
    while waiting:
        await asyncio.sleep(0.1)
        elapsed = time.monotonic() - started
        for model_id, model in list(waiting.items()):
            card = model.describe()
            if card.state == "ready":
                say(
                    f"  {model_id}: ready after {elapsed:.0f} s ({card.engine}, "
                    f"{describe_precision(card)}, context {card.context_length}, "
                    f"vocabulary {card.vocab_size})"
                )
                del waiting[model_id]
            elif card.state == "failed":
                say(f"  {model_id}: failed: {card.detail}", logging.ERROR)
                del waiting[model_id]
        if waiting and time.monotonic() - last_report >= PROGRESS_EVERY_S:
            last_report = time.monotonic()
            states = (f"{model_id}: {model.status[0]}" for model_id, model in waiting.items())
            say(f"  {', '.join(states)}, {elapsed:.0f} s")
    ready = [model for model in models.by_id.values() if model.is_ready]
    if ready and not to_log:
        named = None if models.default else ready[0].id
        print(suggest_calls(url, named, needs_key))


def describe_precision(card: ModelCard) -> str:
    """Return the dtype of a model that is ready, and what half precision costs."""
    assert card.provenance is not None
    dtype, cost = card.provenance.dtype, "not measured against float32"
    if dtype not in ("bfloat16", "float16"):
        return dtype
    if card.rounding is not None:
        cost = f"within {card.rounding:.2g} nats a token of float32"
    return f"{dtype}: {cost}"


def suggest_calls(url: str, model: str | None, needs_key: bool) -> str:
    """Return three calls to paste."""
    key = " -H 'Authorization: Bearer '$LOGSTEER_API_KEY" if needs_key else ""
    field = f'"model": "{model}", ' if model else ""
    bodies = {
        "logprob": f'{{{field}"items": [{{"context": "The capital of France is", '
        '"targets": [" Paris", " London"]}]}',
        "perplexity": f'{{{field}"texts": ["The capital of France is Paris."]}}',
        "tokenize": f'{{{field}"texts": ["The capital of France is Paris."]}}',
    }
    how = ""
    if url.startswith("unix://"):
        how, url = f"--unix-socket {url.removeprefix('unix://')} ", "http://localhost"
    calls = [
        f"  curl -s {how}{url}/{path} -H 'Content-Type: application/json'{key} -d '{body}'"
        for path, body in bodies.items()
    ]
    return "\n".join(["Try:", *calls, f"All endpoints: {url}/docs    Stop: Ctrl-C"])
