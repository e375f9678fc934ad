"""The commands about models: models ..., and selftest."""

import argparse
import asyncio
from collections.abc import Callable
from contextlib import aclosing

from rich.console import Console
from rich.live import Live
from rich.text import Text

from logsteer.async_client import AsyncClient
from logsteer.cli.arguments import (
    AddCommand,
    add_options,
    begin_commands,
    read_server,
)
from logsteer.cli.output import draw_answer, draw_checks, show
from logsteer.client import Client
from logsteer.errors import LogsteerError
from logsteer.schemas import ModelCard, ModelList, SelftestAnswer, SelftestCheck
from logsteer.selftest import run_selftest

_WAIT_S = 300.0
_CHANGES = {
    "load": "start a model that was unloaded, drained or has failed",
    "unload": "answer a model's running requests, then end its engine",
    "drain": "answer a model's running requests, and refuse new ones",
}


def add_model_commands(add: AddCommand, common: argparse.ArgumentParser) -> None:
    """Add `logsteer models` and its commands; without one it lists the models."""
    text = "list, load, unload, drain and replace models"
    examples = "\n  logsteer models\n  logsteer models --format csv\n"
    parser = add("models", _show_models, text, examples, answer=ModelList)
    add_one = begin_commands(parser, common, required=False)
    text = "what is resident, as without it"
    add_one("list", _show_models, text, "\n  logsteer models list\n", answer=ModelList)
    for name, text in _CHANGES.items():
        example = f"\n  logsteer models {name} demo --wait 600\n"
        one = add_one(name, _change(name), text, example)
        one.add_argument("changed", metavar="MODEL")
        _add_wait(one)
    text = "read the configuration again: add, remove and replace models"
    _add_wait(add_one("reload", _reload, text, "\n  logsteer models reload --json\n"))


def _add_wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wait",
        type=float,
        default=_WAIT_S,
        metavar="SECONDS",
        help=f"for the end of the change; it continues without you (default {_WAIT_S:g})",
    )


def _show_models(client: Client, arguments: argparse.Namespace) -> None:
    answer = client.models()
    show(arguments, answer, draw_answer(answer))


def _change(name: str) -> Callable[[Client, argparse.Namespace], None]:
    def change(client: Client, arguments: argparse.Namespace) -> None:
        call = getattr(client, f"{name}_model")
        card: ModelCard = call(arguments.changed, wait_s=arguments.wait)
        show(arguments, card, draw_answer(ModelList(models=[card])))

    return change


def _reload(client: Client, arguments: argparse.Namespace) -> None:
    """Print what has changed; raise LogsteerError, which is exit status 1, where some failed."""
    answer = client.reload(wait_s=arguments.wait)
    kinds = {
        "added": answer.added,
        "removed": answer.removed,
        "replaced": [name for name in answer.replaced if name not in answer.failed],
        "unchanged": answer.unchanged,
        "still running": answer.pending,
        "count from the next start on": answer.needs_restart,
    }
    lines = [f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names]
    show(arguments, answer, *map(Text, lines))
    if answer.failed:
        raise LogsteerError("; ".join(f"{name}: {why}" for name, why in answer.failed.items()))


def add_selftest(add: AddCommand) -> None:
    """Add `logsteer selftest`."""
    parser = add(
        "selftest", _selftest, "measure on a model what the service promises",
        """
  logsteer selftest http://127.0.0.1:8000
  logsteer selftest https://gpu-host --model demo --format csv
""", answer=SelftestAnswer,
    )  # fmt: skip
    text = "the server's address, in place of --base-url"
    parser.add_argument("base_url", nargs="?", metavar="URL", default=argparse.SUPPRESS, help=text)
    add_options(parser, "selftest", {"against": "ID"})


def _selftest(_client: Client, arguments: argparse.Namespace) -> None:
    """Print the table; raise LogsteerError, which is exit status 1, where a check has failed."""
    answer = asyncio.run(_watch(arguments))
    model = answer.provenance
    note = (
        f"Differences in nats a token; noise floor {answer.checks[0].noise_floor:.1e}. "
        f"{answer.model}: {model.engine} {model.engine_version} in {model.dtype}, "
        f"{answer.num_texts} texts of {answer.num_tokens} tokens, {answer.seconds:.0f} s."
    )
    show(arguments, answer, draw_checks(answer.checks), Text(note, "dim"))
    failed = [check.name for check in answer.checks if check.verdict == "failed"]
    if answer.verdict == "failed":
        raise LogsteerError(f"{answer.model} failed its self-test: {', '.join(failed)}")


async def _watch(arguments: argparse.Namespace) -> SelftestAnswer:
    """Return the answer; on a terminal the table grows on stderr, cleared at the end."""
    checks: list[SelftestCheck] = []
    console = Console(stderr=True)
    with Live(console=console, transient=True, auto_refresh=False) as live:
        async with (
            AsyncClient(**read_server(arguments)) as client,
            aclosing(run_selftest(client, against=arguments.against)) as events,
        ):
            async for event in events:
                if isinstance(event, SelftestCheck) and console.is_terminal:
                    checks.append(event)
                    live.update(draw_checks(checks), refresh=True)
    assert isinstance(event, SelftestAnswer), "a stream ends with its result"
    return event
