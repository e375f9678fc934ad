"""`logsteer capture`: the activations of texts, into a file or a directory of shards."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from logsteer.cli.options import add_options
from logsteer.cli.steering_options import add_steering_options, read_changes
from logsteer.cli.terminal import decode_text, given, parse_layers, wants_json
from logsteer.client import Client
from logsteer.errors import LogsteerError

_READING = {"read": None, "hook": "NAME", "bos": None, "on_overflow": None}
FILE_ENDING = ".safetensors"


def add_capture(parser: argparse.ArgumentParser) -> None:
    """Make this the parser of `logsteer capture`."""
    parser.add_argument(
        "file", metavar="FILE", help="a text a line, or JSON lines; - is standard input"
    )
    parser.add_argument("--layers", type=parse_layers, required=True, metavar="N,N-N,…")
    parser.add_argument(
        "--output",
        required=True,
        metavar="PATH",
        help=f"a {FILE_ENDING} file, by one request; or a directory of shards, which goes on where "
        "an earlier capture was interrupted",
    )
    parser.add_argument(
        "--field", default="text", metavar="NAME", help="the text in a line of JSON; default text"
    )
    parser.add_argument(
        "--slices", type=_parse_slices, metavar="N:N,…", help="tokens to read; default all"
    )
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="texts of a shard")
    add_options(parser, "activations", _READING)
    add_steering_options(parser)
    parser.set_defaults(command=_capture)


def _capture(client: Client, arguments: argparse.Namespace) -> None:
    texts = _read_texts(arguments.file, arguments.field)
    options: Any = {**given(arguments, *_READING), **read_changes(arguments)}
    if arguments.slices is not None:
        options["positions"] = {"slices": arguments.slices}
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
    """Return the texts of a file: lines, or where the first is a JSON object, fields of those."""
    data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    lines = [line.rstrip("\r") for line in decode_text(data, name).split("\n")]
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise LogsteerError(f"{name} has no text")
    if not lines[0].lstrip().startswith("{"):
        return lines
    texts = []
    for number, line in enumerate(lines, 1):
        try:
            text = json.loads(line)[field]
        except (ValueError, KeyError, TypeError) as error:
            raise LogsteerError(f'{name}, text {number}: no {{"{field}": "…"}}') from error
        texts.append(str(text))
    return texts


def _parse_slices(text: str) -> list[tuple[int, int]]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return [(int(first), int(end)) for first, end in pairs]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no slices such as 0:5,10:12") from error
