"""The commands about what a server stores: vectors, adapters, overrides, autoencoders."""

import argparse
import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias, get_args

from pydantic import BaseModel
from rich.table import Table
from rich.text import Text

from logsteer._progress import Waiting
from logsteer.cli.arguments import (
    Command,
    add_examples,
    add_options,
    given,
    parse_layers,
    parse_scales,
    read_input,
    reading,
)
from logsteer.cli.output import add_output_options, draw_answer, draw_card, show
from logsteer.client import Client
from logsteer.errors import LogsteerError
from logsteer.extras.datasets import read_json_lines
from logsteer.extras.dose_response import DoseResponse, evaluate_vector
from logsteer.extras.labels import describe_card, label_layers
from logsteer.extras.sae import import_feature
from logsteer.schemas import (
    AdapterList,
    ContentFormat,
    OverrideCard,
    OverrideList,
    SaeList,
    TrainAnswer,
    VectorCard,
    VectorList,
)

AddCommand: TypeAlias = Callable[..., argparse.ArgumentParser]
"""Gives `logsteer RESOURCE` one more command: its name, function, help and examples; `named` says
whether its first argument is the name of a content."""


def add_stored_commands(
    parser: argparse.ArgumentParser,
    common: argparse.ArgumentParser,
    resource: str,
    kind: type[BaseModel],
    example: str,
) -> AddCommand:
    """Give the parser of `logsteer RESOURCE` its commands; return what adds further ones.

    `kind` is the class of the list of cards, and `example` the name of one in examples.
    """
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(
        name: str, command: Command, text: str, examples: str, *, named: bool = True
    ) -> argparse.ArgumentParser:
        one = commands.add_parser(name, parents=[common], help=text)
        one.set_defaults(command=command)
        add_examples(one, examples)
        if named:
            one.add_argument("name", metavar="NAME")
        return one

    def list_cards(client: Client, arguments: argparse.Namespace) -> None:
        answer = getattr(client, resource).list()
        table = draw_answer(answer)
        if answer.damaged:
            table.caption = f"damaged: {', '.join(answer.damaged)}; put or delete them"
        show(arguments, answer, table)

    def delete(client: Client, arguments: argparse.Namespace) -> None:
        gone = getattr(client, resource).delete(arguments.name)
        show(arguments, gone, f"deleted {gone.name}, {gone.sha256 or 'damaged'}")

    examples = f"\n  logsteer {resource} list\n  logsteer {resource} list --format csv\n"
    listing = add(
        "list", list_cards, f"list the {resource} that the server has", examples, named=False
    )
    add_output_options(listing, kind)
    add("delete", delete, f"delete one of the {resource}",
        f"\n  logsteer {resource} delete {example}\n")  # fmt: skip
    return add


ADAPTER_EXAMPLES = """
  logsteer adapters put story adapter
  logsteer adapters list
"""
PUT_ADAPTER_EXAMPLES = """
  logsteer adapters put story adapter
  logsteer score "I feel" " happy" " sad" --adapter story
"""
SAE_EXAMPLES = """
  logsteer saes put res8 gpt2-small-res-jb/blocks.8.hook_resid_pre
  logsteer saes list
"""
PUT_SAE_EXAMPLES = """
  logsteer saes put res8 gpt2-small-res-jb/blocks.8.hook_resid_pre
  logsteer steer "I feel" --vector res8/123:4
"""
OVERRIDE_EXAMPLES = """
  logsteer overrides put gradient direction.safetensors
  logsteer overrides show gradient
  logsteer score "I feel" " happy" " sad" --override gradient:1e-3
"""
SHOW_OVERRIDE_EXAMPLES = """
  logsteer overrides show gradient
"""
PUT_OVERRIDE_EXAMPLES = """
  logsteer overrides put gradient direction.safetensors
"""


def add_adapter_commands(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """Give the parser of `logsteer adapters` its commands."""
    add_examples(parser, ADAPTER_EXAMPLES)
    add = add_stored_commands(parser, common, "adapters", AdapterList, "story")
    text = "upload what PEFT has saved as an adapter"
    put = add("put", _put_adapter, text, PUT_ADAPTER_EXAMPLES)
    put.add_argument(
        "directory",
        metavar="DIRECTORY",
        help="has adapter_config.json and adapter_model.safetensors",
    )
    add_options(put, "adapters.put", {"overwrite": None})


def add_sae_commands(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """Give the parser of `logsteer saes` its commands."""
    add_examples(parser, SAE_EXAMPLES)
    add = add_stored_commands(parser, common, "saes", SaeList, "res8")
    put = add("put", _put_sae, "upload what SAELens has saved", PUT_SAE_EXAMPLES)
    put.add_argument(
        "directory",
        metavar="DIRECTORY",
        help="has cfg.json and sae_weights.safetensors; and labels.json, feature -> text",
    )
    add_options(put, "saes.put", {"layer": "N", "activation_scale": "S", "overwrite": None})


def add_override_commands(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """Give the parser of `logsteer overrides` its commands."""
    add_examples(parser, OVERRIDE_EXAMPLES)
    add = add_stored_commands(parser, common, "overrides", OverrideList, "gradient")
    text = "one direction: what it moves, and how far"
    showing = add("show", _show_override, text, SHOW_OVERRIDE_EXAMPLES)
    add_output_options(showing, OverrideCard)
    put = add("put", _put_override, "upload a file as a direction", PUT_OVERRIDE_EXAMPLES)
    put.add_argument(
        "file",
        metavar="FILE",
        help="safetensors, a tensor for each parameter that moves, under its name in transformers",
    )
    add_options(put, "overrides.put", {"overwrite": None})


def _put_adapter(client: Client, arguments: argparse.Namespace) -> None:
    options: Any = given(arguments, "overwrite")
    card = client.adapters.put(arguments.name, Path(arguments.directory), **options)
    show(arguments, card, draw_answer(card))


def _put_sae(client: Client, arguments: argparse.Namespace) -> None:
    options: Any = given(arguments, "layer", "activation_scale", "overwrite")
    card = client.saes.put(arguments.name, Path(arguments.directory), **options)
    show(arguments, card, draw_answer(card))


def _show_override(client: Client, arguments: argparse.Namespace) -> None:
    card = client.overrides.get(arguments.name)
    show(arguments, card, draw_answer(card))


def _put_override(client: Client, arguments: argparse.Namespace) -> None:
    options: Any = given(arguments, "overwrite")
    card = client.overrides.put(arguments.name, Path(arguments.file), **options)
    show(arguments, card, draw_answer(card))


_PAIR = '{"positive": "…", "negative": "…"}'
_PAIRS = f"a line a pair: {_PAIR}; or a JSON list of these; - is standard input"
_SIDES = ("positive", "negative")
_TRAINING = {"method": None, "whiten": None, "read": None, "hook": "NAME", "bos": None,
             "overwrite": None}  # fmt: skip


EXAMPLES = """
  logsteer vectors train mood pairs.jsonl
  logsteer vectors list
  logsteer steer "Once upon a time" --vector mood
"""
SHOW_EXAMPLES = """
  logsteer vectors show mood
  logsteer vectors show mood --plot layers.png
"""
PUT_EXAMPLES = """
  logsteer vectors put happy mood.safetensors
"""
GET_EXAMPLES = """
  logsteer vectors get mood mood.safetensors
"""
TRAIN_EXAMPLES = """
  logsteer vectors train mood pairs.jsonl
  logsteer vectors train mood pairs.jsonl --method logistic --layers 1-3 --overwrite
"""
EVALUATE_EXAMPLES = """
  logsteer vectors evaluate mood --pairs pairs.jsonl --plot doses.png
  logsteer vectors evaluate mood --pairs pairs.jsonl --scales -2,0,2 --layers 2 --format csv
"""
COMBINE_EXAMPLES = """
  logsteer vectors combine calm mood=-0.5 happy=1 --overwrite
"""
IMPORT_EXAMPLES = """
  logsteer vectors import-sae sae --feature 3 --name golden
"""


def add_vector_commands(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    """Give the parser of `logsteer vectors` its commands."""
    add_examples(parser, EXAMPLES)
    add = add_stored_commands(parser, common, "vectors", VectorList, "mood")
    showing = add(
        "show", _show, "one vector: its layers, their norms, and where it comes from", SHOW_EXAMPLES
    )
    add_output_options(showing, VectorCard, plot=True)
    put = add("put", _put, "upload a file as a vector", PUT_EXAMPLES)
    put.add_argument("file", metavar="FILE", help="safetensors or GGUF; torch.save's is converted")
    add_options(put, "vectors.put", {"format": None, "overwrite": None})
    get = add("get", _get, "download a vector as a file", GET_EXAMPLES)
    get.add_argument("file", metavar="FILE", nargs="?", help="default NAME.FORMAT")
    formats = get_args(ContentFormat)
    get.add_argument("--format", choices=formats, help="default: as FILE ends")
    _add_train(add("train", _train, "make a vector from contrasting texts", TRAIN_EXAMPLES))
    combine = add("combine", _combine, "sum stored vectors", COMBINE_EXAMPLES)
    combine.add_argument(
        "weights", metavar="VECTOR=WEIGHT", nargs="+", type=reading(_parse_weight),
        help="a stored vector and its weight in the sum",
    )  # fmt: skip
    combine.add_argument(
        "--orthogonal-to", metavar="VECTOR", action="append", default=[],
        help="take away what the sum shares with it; repeatable",
    )  # fmt: skip
    add_options(combine, "vectors.combine", {"overwrite": None})
    text = "what a vector does to contrasting texts, by scale"
    _add_evaluate(add("evaluate", _evaluate, text, EVALUATE_EXAMPLES))
    text = "store a feature of a sparse autoencoder, and its encoder as NAME.probe"
    _add_import(add("import-sae", _import_feature, text, IMPORT_EXAMPLES, named=False))


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pairs", metavar="FILE", help=_PAIRS)
    parser.add_argument("--layers", type=parse_layers, metavar="N,N-N,…", help="default: all")
    add_options(parser, "vectors.train", _TRAINING)
    add_output_options(parser, TrainAnswer, plot=True)


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", metavar="FILE", required=True, help=_PAIRS)
    parser.add_argument(
        "--scales",
        type=parse_scales,
        metavar="X,X,…",
        help="default: up to those recommended, and their opposites",
    )
    parser.add_argument(
        "--layers", type=parse_layers, metavar="N,N-N,…", help="default: the one recommended"
    )
    add_output_options(parser, DoseResponse, plot=True)


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", help="the directory that SAELens saved: cfg.json and weights"
    )
    parser.add_argument("--feature", type=int, required=True, metavar="N", help="counted from 0")
    parser.add_argument(
        "--layer",
        type=int,
        metavar="N",
        help="in place of the number in the hook that cfg.json names, or the block whose output is "
        "read where it names none",
    )
    parser.add_argument(
        "--activation-scale",
        type=float,
        metavar="X",
        help="what activations are multiplied by before the autoencoder, where cfg.json has not it",
    )
    parser.add_argument("--name", metavar="NAME", help="default sae-LAYER-FEATURE")


def _show(client: Client, arguments: argparse.Namespace) -> None:
    card = client.vectors.get(arguments.name)
    show(arguments, card, _draw_vectors(card), *draw_card(card))


def _put(client: Client, arguments: argparse.Namespace) -> None:
    options: Any = given(arguments, "format", "overwrite")
    card = client.vectors.put(arguments.name, Path(arguments.file), **options)
    show(arguments, card, _draw_vectors(card))


def _get(client: Client, arguments: argparse.Namespace) -> None:
    ends_in_gguf = (arguments.file or "").endswith(".gguf")
    form: ContentFormat = arguments.format or ("gguf" if ends_in_gguf else "safetensors")
    card = client.vectors.get(arguments.name)
    data = client.vectors.download(arguments.name, form)
    Path(arguments.file or f"{arguments.name}.{form}").write_bytes(data)
    show(arguments, card, _draw_vectors(card))


def _parse_weight(text: str) -> tuple[str, float]:
    name, _, weight = text.partition("=")
    try:
        return name, float(weight)
    except ValueError as error:
        raise ValueError(f"{text!r} is not VECTOR=WEIGHT, as in mood=0.5") from error


def _combine(client: Client, arguments: argparse.Namespace) -> None:
    options: Any = given(arguments, "overwrite")
    weights, without = dict(arguments.weights), arguments.orthogonal_to
    card = client.vectors.combine(arguments.name, weights, without, **options)
    show(arguments, card, _draw_vectors(card))


def _train(client: Client, arguments: argparse.Namespace) -> None:
    pairs = _read_pairs(arguments.pairs)
    options: Any = given(arguments, *_TRAINING, "layers")
    with Waiting(f"training {arguments.name} on {len(pairs)} pairs"):
        answer = client.vectors.train(arguments.name, pairs, **options)
    show(arguments, answer, _draw_vectors(answer.vector), *draw_card(answer))


def _evaluate(client: Client, arguments: argparse.Namespace) -> None:
    pairs = _read_pairs(arguments.pairs)
    options: Any = given(arguments, "scales", "layers")
    with Waiting(f"evaluating {arguments.name} on {len(pairs)} pairs"):
        response = evaluate_vector(client, arguments.name, pairs, **options)
    places = "its own layers" if response.layers is None else label_layers(response.layers)
    head = f"{response.name} at {places}, means over {response.num_pairs} pairs"
    show(arguments, response, Text(head, "bold"), draw_answer(response))


def _import_feature(client: Client, arguments: argparse.Namespace) -> None:
    options: Any = given(arguments, "layer", "activation_scale", "name")
    if "model" in arguments:
        options = {**options, "model": arguments.model}
    stored = import_feature(client, arguments.path, arguments.feature, **options)
    table = _draw_vectors(stored.vector, stored.probe)
    lines = [*(line for line, _ in describe_card(stored.probe)), *stored.remarks]
    show(arguments, stored, table, *map(Text, lines))


def _draw_vectors(*cards: VectorCard) -> Table:
    return draw_answer(VectorList(vectors=list(cards), bytes=0, max_bytes=0))


def _read_pairs(name: str) -> list[dict[str, Any]]:
    """Return the pairs of JSON lines, or of a JSON list. Raises LogsteerError for others."""
    place, data = read_input(name)
    if data.lstrip().startswith(b"["):
        entries = [
            (f"pair {number}", pair) for number, pair in enumerate(_read_list(data, place), 1)
        ]
    else:
        lines = read_json_lines(BytesIO(data), place, _PAIR)
        entries = [(f"line {number}", pair) for number, pair in lines]
    pairs = []
    for where, pair in entries:
        found = pair if isinstance(pair, dict) else {}
        texts = {side: found[side] for side in _SIDES if isinstance(found.get(side), str | list)}
        if len(texts) < len(_SIDES):
            raise LogsteerError(f"{place}, {where}: no two texts or conversations; write {_PAIR}")
        pairs.append(texts)
    if not pairs:
        raise LogsteerError(f"{place} has no pairs")
    return pairs


def _read_list(data: bytes, place: str) -> list[Any]:
    try:
        found: list[Any] = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise LogsteerError(f"{place}: no JSON list of pairs: {reason}") from error
    return found
