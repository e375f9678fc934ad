"""The `logsteer` command: ask a server from a terminal."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import httpx

import logsteer
from logsteer._calls import fits_query
from logsteer._pairs import pair_items, pair_scores
from logsteer._progress import ScoringProgress
from logsteer.cli import tables, token_tables
from logsteer.cli.adapters import add_adapter_commands
from logsteer.cli.capture import add_capture
from logsteer.cli.generation import add_generate
from logsteer.cli.items import add_diagnostics, add_gradient
from logsteer.cli.models import add_model_commands
from logsteer.cli.options import add_options
from logsteer.cli.overrides import add_override_commands
from logsteer.cli.selftest import add_selftest
from logsteer.cli.steering import add_steer, add_sweep
from logsteer.cli.steering_options import add_probe_option, add_steering_options, read_changes
from logsteer.cli.terminal import Command, decode_text, given, show
from logsteer.cli.vectors import add_vector_commands
from logsteer.client import Client
from logsteer.errors import LogsteerError
from logsteer.extras.datasets import name_source
from logsteer.extras.texts import JOIN, JoinedRows
from logsteer.schemas import PerplexityAnswer

EXAMPLES = """examples:
  logsteer models
  logsteer models unload demo
  logsteer score "The capital of France is" " Paris" " London"
  logsteer score "2 + 2 =" 4 --space both --top 3 --json
  logsteer perplexity book.txt --protocol rolling --context-length 512
  zcat corpus.gz | logsteer perplexity -
  logsteer perplexity --dataset Salesforce/wikitext/wikitext-2-raw-v1 --split test \\
      --protocol exl3 --context-length 2048
  logsteer tokenize "Hello world"
  logsteer generate "Once upon a time" --max-tokens 40
  logsteer generate - -n 4 < prompts.jsonl | logsteer diagnostics - > looked-at.jsonl
  logsteer gradient "I feel" " happy" " sad" --layers 1,2
  logsteer selftest demo --against demo-tlens
  logsteer vectors train happy pairs.jsonl --method pca --layers 10,11,12
  logsteer vectors get happy happy.gguf
  logsteer vectors import-sae blocks.8.hook_resid_pre --feature 123 --name golden
  logsteer steer "Once upon a time" --vector happy:4@2 --baseline --seed 1
  logsteer score "I feel" " happy" " sad" --vector happy:4@2
  logsteer sweep --vector happy@2 --scales=-4,-2,0,2,4 --item "I feel" " happy" " sad" \\
      --text book.txt --plot sweep.png
  logsteer capture corpus.jsonl --layers 2,3 --read mean --output means.safetensors

LOGSTEER_BASE_URL and LOGSTEER_API_KEY stand in for --base-url and --api-key.
Each command's --help has more. Exit status: 0 done, 1 refused or not reached, 2 wrong usage,
130 interrupted, 141 nobody reads the output any more.
"""

_SCORING = {"boundary": None, "space": None, "top": "N", "precision": None}
_WINDOWS = {
    "protocol": None, "context_length": "TOKENS", "stride": "TOKENS", "rows": "N", "bos": None,
    "precision": None,
}  # fmt: skip
"""Options of a command that are parameters of its call -> what stands for a value in the help."""


def main(argv: Sequence[str] | None = None, *, transport: httpx.BaseTransport | None = None) -> int:
    """Run the command and return its exit status; answers go to stdout, the rest to stderr.

    `transport` replaces the network. Raises SystemExit(2) for wrong usage.
    """
    arguments = _build_parser().parse_args(argv)
    given = vars(arguments)
    names = ("base_url", "api_key", "timeout", "model")
    settings: Any = {name: given[name] for name in names if name in given}
    command: Command = arguments.command
    try:
        with Client(transport=transport, **settings) as client:
            command(client, arguments)
    except LogsteerError as error:
        return _fail(str(error))
    except BrokenPipeError:
        # Python would write what is left at its end, and fail there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        return _fail(f"{error.strerror or error}: {error.filename}" if error.filename else error)
    except KeyboardInterrupt:
        return 130
    return 0


def _fail(message: object) -> int:
    print("error:", " ".join(str(message).split()), file=sys.stderr)
    return 1


def _build_parser() -> argparse.ArgumentParser:
    common = _build_common_options()
    parser = argparse.ArgumentParser(
        prog="logsteer",
        description="Score text with the language models of a logsteer server, and steer them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
    )
    parser.add_argument("--version", action="version", version=f"logsteer {logsteer.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add = partial(commands.add_parser, parents=[common])
    add_model_commands(add("models", help="list, load, unload, drain and replace models"), common)
    _add_score(add("score", help="log-probability of each target after a context"))
    _add_perplexity(
        add("perplexity", help="log-likelihood of a text file or data set of any length")
    )
    tokenize = add("tokenize", help="cut a text into tokens")
    tokenize.add_argument("text", metavar="TEXT")
    tokenize.set_defaults(command=_show_tokens)
    add_generate(add("generate", help="continue prompts, from arguments or JSON lines"))
    add_diagnostics(add("diagnostics", help="what a sampling policy saw at each token of targets"))
    add_gradient(add("gradient", help="derivatives of targets' log-probabilities"))
    add_steer(add("steer", help="continue a prompt under steering, as it is generated"))
    add_sweep(add("sweep", help="what steering does to targets and texts, scale by scale"))
    add_capture(add("capture", help="activations of texts, as files"))
    add_selftest(add("selftest", help="measure on a model what the service promises"))
    add_vector_commands(add("vectors", help="store, make and fetch steering vectors"), common)
    add_adapter_commands(add("adapters", help="store LoRA adapters"), common)
    add_override_commands(add("overrides", help="store directions of the parameters"), common)
    return parser


def _build_common_options() -> argparse.ArgumentParser:
    # SUPPRESS keeps the command's own defaults from hiding what stood before the command.
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    group = common.add_argument_group("server")
    group.add_argument("--base-url", metavar="URL", help="default http://127.0.0.1:8000")
    group.add_argument("--api-key", metavar="KEY")
    group.add_argument("--model", metavar="ID", help="default: the only one")
    group.add_argument("--timeout", type=_positive, metavar="SECONDS", help="default 600")
    group.add_argument("--json", action="store_true", help="print the answer as JSON, only that")
    return common


def _add_score(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("context", metavar="CONTEXT")
    parser.add_argument("targets", metavar="TARGET", nargs="+")
    add_options(parser, "logprob", _SCORING)
    add_steering_options(parser)
    add_probe_option(parser)
    parser.set_defaults(command=_show_scores)


def _add_perplexity(parser: argparse.ArgumentParser) -> None:
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("file", metavar="FILE", nargs="?", help="UTF-8 text; - is standard input")
    text.add_argument(
        "--dataset", metavar="NAME[/CONFIG][@SPLIT]",
        help="of the Hugging Face hub, or a directory like one; or a file of JSON lines",
    )  # fmt: skip
    rows = parser.add_argument_group("data sets")
    rows.add_argument("--split", metavar="SPLIT", help="in place of @SPLIT; default test")
    rows.add_argument("--column", metavar="NAME", help="what is read of a row; default text")
    rows.add_argument("--join", metavar="TEXT", help="stands between rows; default two newlines")
    add_options(parser, "perplexity_stream", _WINDOWS)
    add_steering_options(parser)
    parser.set_defaults(command=_show_perplexity)


def _positive(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return seconds


def _show_scores(client: Client, arguments: argparse.Namespace) -> None:
    own = given(arguments, *_SCORING, "probes")
    options: Any = {**own, **read_changes(arguments)}
    items = pair_items([arguments.context], arguments.targets)
    answer = client.logprob(items, **options)
    result = pair_scores(answer, 1, len(arguments.targets))[0]
    drawn = [*tables.draw_scores(result)]
    if arguments.probes:
        drawn += [
            token_tables.draw_token_columns(target.tokens or [], target.logprobs or [], target)
            for target in result.targets
        ]
    show(arguments, answer, *drawn, *tables.draw_changes(answer))


def _show_tokens(client: Client, arguments: argparse.Namespace) -> None:
    answer = client.tokenize(arguments.text)
    show(arguments, answer, tables.draw_tokens(answer.results[0]))


def _show_perplexity(client: Client, arguments: argparse.Namespace) -> None:
    own = given(arguments, *_WINDOWS)
    options: Any = {**own, **read_changes(arguments)}
    rows = given(arguments, "split", "column", "join")
    if arguments.dataset is not None:
        source = name_source(arguments.dataset, rows.get("split"))
        joined = JoinedRows(source, rows.get("column", "text"), rows.get("join", JOIN))
        answer = _score_file(client, cast(BinaryIO, joined), options)
    elif rows:
        raise LogsteerError(f"--{next(iter(rows))} goes with --dataset; leave it out")
    elif arguments.file == "-":
        answer = _score_file(client, sys.stdin.buffer, options)
    else:
        with Path(arguments.file).open("rb") as file:
            answer = _score_file(client, file, options)
    show(arguments, answer, tables.draw_perplexity(answer), *tables.draw_changes(answer))


def _score_file(client: Client, file: BinaryIO, options: Mapping[str, Any]) -> PerplexityAnswer:
    with ScoringProgress(file) as progress:
        if fits_query("perplexity_stream", options):
            events = client.perplexity_stream(progress.source, **options)
        else:
            # Vectors by value may be too long for a query; a body takes them beside a whole text.
            text = decode_text(progress.source.read(), getattr(file, "name", "the text"))
            events = client.perplexity_events(text, **options)
        with closing(events):
            for event in events:
                if isinstance(event, PerplexityAnswer):
                    return event
                progress.show(event)
    raise AssertionError("a stream ends with its result or raises")
