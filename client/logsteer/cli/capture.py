"""`logsteer capture`: the activations of texts, into a file or a directory of shards."""

import argparse
import json
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, get_args

from logsteer.cli.options import add_options
from logsteer.cli.output import wants_json
from logsteer.cli.steering_options import add_steering_options, parse_positions, read_changes
from logsteer.cli.terminal import add_examples, given, parse_layers, read_input
from logsteer.client import Client
from logsteer.errors import LogsteerError
from logsteer.extras.json_files import decode_text, read_json_lines
from logsteer.schemas import AllPositions

_READING = {"read": None, "hook": "NAME", "bos": None, "on_overflow": None}
EXAMPLES = """
  logsteer capture corpus.jsonl --layers 2,3 --read mean --output means.safetensors
  logsteer capture corpus.jsonl --layers 2 --output shards
"""
FILE_ENDING = ".safetensors"


def add_capture(parser: argparse.ArgumentParser) -> None:
    """Make this the parser of `logsteer capture`."""
    add_examples(parser, EXAMPLES)
    parser.add_argument(
        "file", metavar="FILE",
        help="a text a line; or, where the first line is an object or a string of JSON, JSON lines "
        "of those, as in a .jsonl; - is standard input",
    )  # fmt: skip
    parser.add_argument("--layers", type=parse_layers, required=True, metavar="N,N-N,…")
    parser.add_argument(
        "--output",
        required=True,
        metavar="PATH",
        help=f"a {FILE_ENDING} file, by one request; or a directory of shards, which resumes "
        "an interrupted capture",
    )
    parser.add_argument(
        "--field", default="text", metavar="NAME", help="the text in a line of JSON; default text"
    )
    parser.add_argument(
        "--at", type=partial(parse_positions, names=get_args(AllPositions)), metavar="WHICH",
        help="tokens to read: all, or slices as in 0:5,8:10; default all",
    )  # fmt: skip
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="texts of a shard")
    add_options(parser, "activations", _READING)
    add_steering_options(parser)
    parser.set_defaults(command=_capture)


def _capture(client: Client, arguments: argparse.Namespace) -> None:
    texts = _read_texts(arguments.file, arguments.field)
    options: Any = {**given(arguments, *_READING), **read_changes(arguments)}
    if arguments.at is not None:
        options["positions"] = arguments.at
    path = Path(arguments.output)
    if path.suffix != FILE_ENDING:
        shards = client.capture(
            texts, path, arguments.layers, batch_size=arguments.batch_size, **options
        )
        if wants_json(arguments):
            print(json.dumps(shards.contents, indent=2))
        else:
            print(
                f"{path}: {shards.num_items} texts, {shards.num_rows} rows; shards: {len(shards)}"
            )
        return
    found = client.activations(texts, arguments.layers, **options)
    found.save(path)
    rows, width = next(iter(found.layers.values())).shape
    layers = ", ".join(map(str, found.layers))
    note = f"{path}: {len(found)} texts, {rows} rows of {width} numbers at layers {layers}"
    print(found.answer.model_dump_json(indent=2) if wants_json(arguments) else note)


def _read_texts(name: str, field: str) -> list[str]:
    """Return the texts of a file: lines as they are, or JSON lines: strings, or fields of objects.

    Raises LogsteerError for a JSON line without a text.
    """
    place, data = read_input(name)
    if not _has_json(data, place):
        lines = [line.rstrip("\r") for line in decode_text(data, place).split("\n")]
        texts = [line for line in lines if line.strip()]
    else:
        texts = []
        form = f"a text in quotation marks, or an object, {json.dumps({field: 'Once upon a time'})}"
        for number, row in read_json_lines(BytesIO(data), place, form):
            text = row.get(field) if isinstance(row, dict) else row
            if not isinstance(text, str):
                raise LogsteerError(
                    f"{place}, line {number}: no text; write {form}, or name --field"
                )
            texts.append(text)
    if not texts:
        raise LogsteerError(f"{place} has no text")
    return texts


def _has_json(data: bytes, name: str) -> bool:
    """Return whether JSON lines are meant: a text may begin with a quotation mark, too."""
    first = data.lstrip().partition(b"\n")[0]
    if name.endswith((".jsonl", ".json")) or first.startswith(b"{"):
        return True
    try:
        return isinstance(json.loads(first), str)
    except (ValueError, RecursionError):
        return False
