"""`logsteer score-file`: every row of a file through an endpoint, each exactly once."""

import argparse
import json
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from logsteer.cli.arguments import (
    AddCommand,
    add_options,
    cut_pair,
    given,
    read_changes,
    reading,
)
from logsteer.cli.output import draw_statistics, show
from logsteer.client import Client
from logsteer.corpus import FileScores, JobLimits, score_file
from logsteer.corpus.rows import KINDS
from logsteer.errors import LogsteerError

_OPTIONS: Mapping[str, Mapping[str, str | None]] = {
    "logprob": {"boundary": None, "space": None, "top": "N", "columns": "NAME", "bos": None,
                "on_overflow": None, "precision": None},
    "perplexity": {"protocol": None, "context_length": "TOKENS", "stride": "TOKENS"},
    "generate": {"max_tokens": "N", "n": "N", "temperature": "T", "top_p": "P", "top_k": "K",
                 "min_p": "P", "seed": "N", "stop": "TEXT"},
}  # fmt: skip
_FIELD = "FIELD=COLUMN"
_BOUNDS = {
    "batch_size": "rows of a request", "batch_bytes": "bytes of a request",
    "concurrency": "concurrent requests to each server, at most; fewer where it refuses some",
    "commit_s": "seconds of work that an interruption may lose",
    "patience_s": "stop after this many seconds without an answer",
    "max_failures": "stop after this many failures in a row; 0: never",
}  # fmt: skip


def add_score_file(add: AddCommand) -> None:
    """Add `logsteer score-file`."""
    parser = add(
        "score-file", _score_file, "every row of a file, each exactly once; resumes",
        """
  logsteer score-file corpus.jsonl scores.jsonl --endpoint perplexity --context-length 128
  logsteer score-file items.jsonl targets.jsonl --options '{"per_token": false}'
  logsteer score-file corpus.jsonl moods.jsonl.gz --column text --target " glad" --target " sad"

A row of IN is an object with the fields of one item: context and targets, context_ids and
target_ids, or messages and targets; text (perplexity); prompt, prompt_ids or messages (generate,
steer). --map FIELD=COLUMN names other columns. OUT has a row for each, in the same order:
{"row": 0, "result": …}, or {"row": 0, "error": …} for a refused one, and then exit status 1. Until
OUT is complete, OUT.part and OUT.job are beside it, and the same command resumes after a crash.
OUT.job stays, and says what OUT was made of. Repeat --url to share the rows among several servers.
""", steers=True, probes=True, answer=FileScores, grains=("job",),
    )  # fmt: skip
    lines = "JSON lines (.jsonl, .jsonl.gz)"
    parser.add_argument("source", metavar="IN", help=f"{lines} or .parquet")
    parser.add_argument("target", metavar="OUT", help=lines)
    parser.add_argument("--endpoint", choices=KINDS, default="logprob", help="default logprob")
    rows = parser.add_argument_group("rows")
    rows.add_argument(
        "--map", dest="fields", action="append", metavar=_FIELD,
        type=reading(partial(cut_pair, form=_FIELD)),
        help="the column that holds a field of an item; repeatable",
    )  # fmt: skip
    rows.add_argument(
        "--column", metavar="COLUMN", help="the column with the text, context or prompt"
    )
    rows.add_argument("--id", metavar="COLUMN", help="the column to copy to each result, as id")
    rows.add_argument(
        "--target", dest="targets", action="append", metavar="TEXT", default=[],
        help="a target for rows without any; repeatable",
    )  # fmt: skip
    rows.add_argument("--strict", action="store_true", help="stop at the first row that fails")
    rows.add_argument("--restart", action="store_true", help="start over, whatever is there")
    where = parser.add_argument_group("where")
    where.add_argument(
        "--url", dest="urls", action="append", metavar="URL",
        help="one of several servers with the same model; repeatable",
    )  # fmt: skip
    where.add_argument(
        "--priority", choices=("batch", "interactive"), default="batch",
        help="priority of the requests; default batch, which lets others pass",
    )  # fmt: skip
    for name, text in _BOUNDS.items():
        default = getattr(JobLimits, name)
        where.add_argument(
            f"--{name.replace('_', '-')}", type=type(default), metavar="N",
            help=f"{text}; default {default:g}",
        )  # fmt: skip
    parser.add_argument(
        "--options",
        type=reading(_parse_options),
        metavar="JSON",
        help="more fields for every request",
    )
    for endpoint, metavars in _OPTIONS.items():
        add_options(parser.add_argument_group(endpoint), endpoint, metavars)


def _score_file(_client: Client, arguments: argparse.Namespace) -> None:
    names = [name for metavars in _OPTIONS.values() for name in metavars]
    options: dict[str, Any] = {
        **given(arguments, *names, "probes"),
        **read_changes(arguments),
        **(arguments.options or {}),
    }
    own = vars(arguments)
    first = [own["base_url"]] if "base_url" in own else []
    fields = dict(arguments.fields or [])
    if arguments.column is not None:
        fields.setdefault(KINDS[arguments.endpoint].text, arguments.column)
    job: dict[str, Any] = {
        "source": arguments.source, "target": arguments.target, "endpoint": arguments.endpoint,
        "options": options, "fields": fields, "id_column": arguments.id,
        "targets": arguments.targets, "limits": JobLimits(**given(arguments, *_BOUNDS)),
        "base_url": [*first, *(arguments.urls or [])] or None,
        **{name: own.get(name) for name in ("model", "api_key", "timeout")},
        **{name: own[name] for name in ("priority", "strict", "restart")},
    }  # fmt: skip
    try:
        scores = score_file(**job)
    except KeyboardInterrupt:
        print("interrupted; the same command resumes", file=sys.stderr)
        raise
    show(
        arguments,
        scores,
        *(draw_statistics(one) for one in (scores, scores.total) if one is not None),
        rows=lambda: [scores.model_dump(mode="json")],
    )
    if scores.failed:
        raise LogsteerError(
            f"{scores.failed} of {scores.rows} rows failed; {arguments.target} has the error of "
            "each in place of its result"
        )


def _parse_options(text: str) -> dict[str, Any]:
    options = json.loads(text)
    if not isinstance(options, dict):
        raise ValueError(f"{text!r:.60} is not a JSON object")
    return options
