"""The `logsteer` command: ask a server from a terminal."""

import argparse
import os
import sys
from collections.abc import Sequence

import httpx

import logsteer
from logsteer.cli.arguments import (
    Command,
    begin_commands,
    read_server,
    reading,
    write_examples,
)
from logsteer.cli.generation import add_chat, add_generate, add_steer, add_sweep
from logsteer.cli.models import add_model_commands, add_selftest
from logsteer.cli.output import check_output
from logsteer.cli.score_file import add_score_file
from logsteer.cli.scoring import (
    add_capture,
    add_diagnostics,
    add_gradient,
    add_lens,
    add_patch,
    add_perplexity,
    add_score,
    add_tokenize,
)
from logsteer.cli.stored import (
    add_stored_commands,
    add_variants,
)
from logsteer.cli.usage import Parser
from logsteer.client import Client
from logsteer.errors import (
    DeadlineError,
    LogsteerError,
    OverloadedError,
    TransportError,
    UnavailableError,
)

EXAMPLES = """
  logsteer score "The capital of France is" " Paris" " London"
  cat book.txt | logsteer perplexity - --plot along.png
  logsteer vectors train mood pairs.jsonl
  logsteer steer "Once upon a time" --vector mood --baseline --seed 1
  logsteer sweep --vector mood --scales -4,-2,0,2,4 --item "I feel" " happy" " sad"
  logsteer score-file corpus.jsonl sums.jsonl --endpoint perplexity

`logsteer serve MODEL` starts a server, if logsteer-server is installed; `--demo` serves the demo.
Each command's --help has more examples. LOGSTEER_BASE_URL, LOGSTEER_API_KEY and LOGSTEER_MODEL
replace --base-url, --api-key and --model; NO_COLOR turns colours off.

exit status:
  0    done
  1    refused: by the server, or because of a file, or a self-test has failed
  2    wrong usage
  3    not now: no connection, no answer in time, or a server that is loading or overloaded
  130  interrupted
  141  the reader of the output has closed it
"""
REFUSED, NOT_NOW, INTERRUPTED, UNREAD = 1, 3, 130, 141
_PASSING = (TransportError, OverloadedError, UnavailableError, DeadlineError)


def run(argv: Sequence[str], *, transport: httpx.BaseTransport | None = None) -> int:
    """Run the command and return its exit status; answers go to stdout, the rest to stderr.

    `transport` replaces the network. Raises SystemExit(2) for wrong usage.
    """
    arguments = build_parser().parse_args(argv)
    command: Command = arguments.command
    try:
        check_output(arguments)
        with Client(transport=transport, **read_server(arguments)) as client:
            command(client, arguments)
        sys.stdout.flush()
    except LogsteerError as error:
        return _fail(str(error), choose_status(error))
    except BrokenPipeError:
        # Python would write what is left at its end, and fail there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except ImportError as error:
        return _fail(error)
    except OSError as error:
        return _fail(f"{error.strerror or error}: {error.filename}" if error.filename else error)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def choose_status(error: BaseException | None) -> int:
    """Return the exit status for an error: whether the same command may succeed later."""
    if isinstance(error, _PASSING):
        return NOT_NOW
    return choose_status(error.__cause__) if isinstance(error, LogsteerError) else REFUSED


def _fail(message: object, status: int = REFUSED) -> int:
    print("error:", " ".join(str(message).split()), file=sys.stderr)
    return status


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command, as for shtab: `shtab logsteer.cli.command.build_parser`."""
    common = _build_common_options()
    parser = Parser(
        prog="logsteer",
        description="Score text with the language models of a logsteer server, and steer them.",
        parents=[common],
        **write_examples(EXAMPLES),
    )
    parser.add_argument("--version", action="version", version=f"logsteer {logsteer.__version__}")
    add = begin_commands(parser, common)
    add_model_commands(add, common)
    for add_command in (
        add_chat, add_score, add_perplexity, add_score_file, add_tokenize, add_generate,
        add_diagnostics, add_lens, add_patch, add_gradient, add_steer, add_sweep, add_capture,
        add_selftest,
    ):  # fmt: skip
        add_command(add)
    add_stored_commands(add, common)
    add_variants(add, common)
    return parser


def _build_common_options() -> Parser:
    # SUPPRESS keeps the command's own defaults from hiding what stood before the command.
    common = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    group = common.add_argument_group("server")
    group.add_argument("--base-url", metavar="URL", help="default http://127.0.0.1:8000")
    group.add_argument("--api-key", metavar="KEY")
    group.add_argument("--model", metavar="ID", help="default: the server's")
    group.add_argument(
        "--timeout", type=reading(_parse_seconds), metavar="SECONDS", help="default 600"
    )
    group.add_argument(
        "--json", action="store_true", help="print the answer as JSON and nothing else"
    )
    return common


def _parse_seconds(text: str) -> float:
    if not (seconds := float(text)) > 0:
        raise ValueError(f"{text!r} is not above 0")
    return seconds
