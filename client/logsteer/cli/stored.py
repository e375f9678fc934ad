"""The commands about what a server stores: vectors, adapters, overrides, autoencoders."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from rich.table import Table
from rich.text import Text

from logsteer._progress import Waiting
from logsteer.cli.arguments import (
    AddCommand,
    Command,
    add_options,
    begin_commands,
    cut_pair,
    given,
    parse_layers,
    parse_scales,
    read_entries,
    reading,
)
from logsteer.cli.output import draw_answer, draw_card, show
from logsteer.client import Client
from logsteer.errors import LogsteerError
from logsteer.extras.dose_response import DoseResponse, evaluate_vector
from logsteer.extras.labels import label_layers
from logsteer.schemas import (
    AdapterList,
    CaptureList,
    ContentFormat,
    OverrideCard,
    OverrideList,
    SaeList,
    TrainAnswer,
    VariantList,
    VectorCard,
    VectorList,
)

_CARDS: Mapping[str, type[BaseModel]] = {
    "vectors": VectorList, "adapters": AdapterList, "overrides": OverrideList, "saes": SaeList,
    "variants": VariantList, "captures": CaptureList,
}  # fmt: skip
"""What is stored -> the list of its cards."""


def add_stored_commands(add: AddCommand, common: argparse.ArgumentParser) -> None:
    """Add `logsteer vectors`, `adapters`, `saes`, `overrides`, `captures`, and their commands."""
    parser = add(
        "vectors", None, "store, make and fetch steering vectors",
        """
  logsteer vectors train mood pairs.jsonl
  logsteer vectors list
  logsteer steer "Once upon a time" --vector mood
""",
    )  # fmt: skip
    add_one = begin_commands(parser, common)
    _add_vector_commands(_begin_store(add_one, "vectors", "mood"))
    parser = add(
        "adapters", None, "store LoRA adapters",
        """
  logsteer adapters put story adapter
  logsteer adapters list
""",
    )  # fmt: skip
    _add_put(
        _begin_store(begin_commands(parser, common), "adapters", "story"), "adapters", "DIRECTORY",
        "upload what PEFT has saved as an adapter",
        """
  logsteer adapters put story adapter
  logsteer score "I feel" " happy" " sad" --adapter story
""",
        "has adapter_config.json and adapter_model.safetensors",
    )  # fmt: skip
    parser = add(
        "saes", None, "store sparse autoencoders",
        """
  logsteer saes put res8 gpt2-small-res-jb/blocks.8.hook_resid_pre
  logsteer saes list
""",
    )  # fmt: skip
    _add_put(
        _begin_store(begin_commands(parser, common), "saes", "res8"), "saes", "DIRECTORY",
        "upload what SAELens has saved",
        """
  logsteer saes put res8 gpt2-small-res-jb/blocks.8.hook_resid_pre
  logsteer steer "I feel" --vector res8/123:4
""",
        "has cfg.json and sae_weights.safetensors; and labels.json, feature -> text",
        layer="N", activation_scale="S",
    )  # fmt: skip
    parser = add(
        "overrides", None, "store directions of the parameters",
        """
  logsteer overrides put gradient direction.safetensors
  logsteer overrides show gradient
  logsteer score "I feel" " happy" " sad" --override gradient:1e-3
""",
    )  # fmt: skip
    add_one = _begin_store(begin_commands(parser, common), "overrides", "gradient")
    _add_put(
        add_one, "overrides", "FILE", "upload a file as a direction",
        "\n  logsteer overrides put gradient direction.safetensors\n",
        "safetensors, a tensor for each parameter that moves, under its name in transformers",
    )  # fmt: skip
    text = "one direction: what it moves, and how far"
    examples = "\n  logsteer overrides show gradient\n"
    add_one("show", _show_override, text, examples, answer=OverrideCard)
    text = "list and delete data sets of activations; `logsteer capture` makes them"
    parser = add("captures", None, text, "\n  logsteer captures list\n")
    _begin_store(begin_commands(parser, common), "captures", "res2")


_VARIANT = {"adapter": "NAME", "chat_template_kwargs": "JSON", "description": "TEXT",
            "overwrite": None}  # fmt: skip


def add_variants(add: AddCommand, common: argparse.ArgumentParser) -> None:
    """Add `logsteer variants` and its commands."""
    parser = add(
        "variants", None, "store steered models, whose names are models",
        """
  logsteer variants put cheerful mood:4@2
  logsteer generate "Once upon a time" --model cheerful
""",
    )  # fmt: skip
    add_one = _begin_store(begin_commands(parser, common), "variants", "cheerful")
    text = "store a model with its steering under a name"
    put = add_one("put", _put_variant, text, "\n  logsteer variants put cheerful mood:4@2\n")
    put.add_argument("steering", metavar="NAME[:SCALE][@LAYERS]", nargs="*", help="as of --vector")
    add_options(put, "variants.put", _VARIANT)


def _put_variant(client: Client, arguments: argparse.Namespace) -> None:
    options: Any = {**given(arguments, *_VARIANT), "steering": arguments.steering or None}
    if "model" in arguments:
        options["model"] = arguments.model
    card = client.variants.put(arguments.name, **options)
    show(arguments, card, _draw_cards("variants", card))


def _begin_store(add: AddCommand, resource: str, example: str) -> AddCommand:
    """Add `list` and `delete` to the commands of `logsteer RESOURCE`.

    Return what adds further commands, whose first argument is a name; `example` is one.
    """

    def add_named(
        name: str, command: Command, text: str, examples: str, **options: Any
    ) -> argparse.ArgumentParser:
        one = add(name, command, text, examples, **options)
        one.add_argument("name", metavar="NAME")
        return one

    def list_cards(client: Client, arguments: argparse.Namespace) -> None:
        answer = getattr(client, resource).list()
        table = draw_answer(answer)
        if damaged := getattr(answer, "damaged", None):
            table.caption = f"damaged: {', '.join(damaged)}; put or delete them"
        show(arguments, answer, table)

    def delete(client: Client, arguments: argparse.Namespace) -> None:
        gone = getattr(client, resource).delete(arguments.name)
        show(arguments, gone, f"deleted {gone.name}, {gone.sha256 or 'damaged'}")

    text = f"list the {resource} that the server has"
    examples = f"\n  logsteer {resource} list\n  logsteer {resource} list --format csv\n"
    add("list", list_cards, text, examples, answer=_CARDS[resource])
    examples = f"\n  logsteer {resource} delete {example}\n"
    add_named("delete", delete, f"delete one of the {resource}", examples)
    return add_named


def _add_put(
    add: AddCommand,
    resource: str,
    metavar: str,
    text: str,
    examples: str,
    content: str,
    **metavars: str | None,
) -> None:
    """Add the command that uploads a path; `metavars` are those of its options, as for
    `add_options`.
    """  # fmt: skip
    names = {**metavars, "overwrite": None}

    def put(client: Client, arguments: argparse.Namespace) -> None:
        options = given(arguments, *names)
        card = getattr(client, resource).put(arguments.name, Path(arguments.content), **options)
        show(arguments, card, _draw_cards(resource, card))

    parser = add("put", put, text, examples)
    parser.add_argument("content", metavar=metavar, help=content)
    add_options(parser, f"{resource}.put", names)


def _draw_cards(resource: str, *cards: BaseModel) -> Table:
    return draw_answer(_CARDS[resource](**{resource: cards, "bytes": 0, "max_bytes": 0}))


def _show_override(client: Client, arguments: argparse.Namespace) -> None:
    card = client.overrides.get(arguments.name)
    show(arguments, card, _draw_cards("overrides", card))


_PAIR = '{"positive": "…", "negative": "…"}'
_PAIRS = f"a line a pair: {_PAIR}; or a JSON list of these; - is standard input"
_SIDES = ("positive", "negative")
_TRAINING = {"method": None, "whiten": "CAPTURE", "read": None, "hook": "NAME", "bos": None,
             "max_harm": "X", "harm_texts": "TEXT", "overwrite": None}  # fmt: skip


def _add_vector_commands(add: AddCommand) -> None:
    text = "one vector: its layers, their norms, and where it comes from"
    examples = "\n  logsteer vectors show mood\n  logsteer vectors show mood --plot layers.png\n"
    add("show", _show, text, examples, answer=VectorCard, plots=True)
    _add_put(
        add, "vectors", "FILE", "upload a file as a vector",
        "\n  logsteer vectors put happy mood.safetensors\n",
        "safetensors or GGUF; torch.save's is converted", format=None,
    )  # fmt: skip
    examples = "\n  logsteer vectors get mood mood.safetensors\n"
    get = add("get", _get, "download a vector as a file", examples)
    get.add_argument("file", metavar="FILE", nargs="?", help="default NAME.FORMAT")
    formats = get_args(ContentFormat)
    get.add_argument("--format", choices=formats, help="default: as FILE ends")
    examples = "\n  logsteer vectors combine calm mood=-0.5 happy=1 --overwrite\n"
    combine = add("combine", _combine, "sum stored vectors", examples)
    combine.add_argument(
        "weights", metavar="VECTOR=WEIGHT", nargs="+", type=reading(_parse_weight),
        help="a stored vector and its weight in the sum",
    )  # fmt: skip
    combine.add_argument(
        "--orthogonal-to", metavar="VECTOR", action="append", default=[],
        help="take away what the sum shares with it; repeatable",
    )  # fmt: skip
    add_options(combine, "vectors.combine", {"overwrite": None})
    _add_train(add)
    _add_evaluate(add)


def _add_train(add: AddCommand) -> None:
    parser = add(
        "train", _train, "make a vector from contrasting texts",
        """
  logsteer vectors train mood pairs.jsonl
  logsteer vectors train mood pairs.jsonl --method logistic --layers 1-3 --overwrite
""", answer=TrainAnswer, plots=True,
    )  # fmt: skip
    parser.add_argument("pairs", metavar="FILE", help=_PAIRS)
    parser.add_argument("--layers", type=parse_layers, metavar="N,N-N,…", help="default: all")
    add_options(parser, "vectors.train", _TRAINING)


def _add_evaluate(add: AddCommand) -> None:
    parser = add(
        "evaluate", _evaluate, "what a vector does to contrasting texts, by scale",
        """
  logsteer vectors evaluate mood --pairs pairs.jsonl --plot doses.png
  logsteer vectors evaluate mood --pairs pairs.jsonl --scales -2,0,2 --layers 2 --format csv
""", answer=DoseResponse, plots=True,
    )  # fmt: skip
    parser.add_argument("--pairs", metavar="FILE", required=True, help=_PAIRS)
    parser.add_argument(
        "--scales",
        type=parse_scales,
        metavar="X,X,…",
        help="default: about the one recommended, and their opposites",
    )
    parser.add_argument(
        "--layers", type=parse_layers, metavar="N,N-N,…", help="default: the one recommended"
    )


def _show(client: Client, arguments: argparse.Namespace) -> None:
    card = client.vectors.get(arguments.name)
    show(arguments, card, _draw_cards("vectors", card), *draw_card(card))


def _get(client: Client, arguments: argparse.Namespace) -> None:
    ends_in_gguf = (arguments.file or "").endswith(".gguf")
    form: ContentFormat = arguments.format or ("gguf" if ends_in_gguf else "safetensors")
    card = client.vectors.get(arguments.name)
    data = client.vectors.download(arguments.name, form)
    Path(arguments.file or f"{arguments.name}.{form}").write_bytes(data)
    show(arguments, card, _draw_cards("vectors", card))


def _parse_weight(text: str) -> tuple[str, float]:
    name, weight = cut_pair(text, "VECTOR=WEIGHT")
    try:
        return name, float(weight)
    except ValueError as error:
        raise ValueError(f"{text!r} has no number behind =, as mood=0.5 has") from error


def _combine(client: Client, arguments: argparse.Namespace) -> None:
    options: Any = given(arguments, "overwrite")
    weights, without = dict(arguments.weights), arguments.orthogonal_to
    card = client.vectors.combine(arguments.name, weights, without, **options)
    show(arguments, card, _draw_cards("vectors", card))


def _train(client: Client, arguments: argparse.Namespace) -> None:
    pairs = _read_pairs(arguments.pairs)
    options: Any = given(arguments, *_TRAINING, "layers")
    with Waiting(f"training {arguments.name} on {len(pairs)} pairs"):
        answer = client.vectors.train(arguments.name, pairs, **options)
    show(arguments, answer, _draw_cards("vectors", answer.vector), *draw_card(answer))


def _evaluate(client: Client, arguments: argparse.Namespace) -> None:
    pairs = _read_pairs(arguments.pairs)
    options: Any = given(arguments, "scales", "layers")
    with Waiting(f"evaluating {arguments.name} on {len(pairs)} pairs"):
        response = evaluate_vector(client, arguments.name, pairs, **options)
    places = "its own layers" if response.layers is None else label_layers(response.layers)
    head = f"{response.name} at {places}, means over {response.num_pairs} pairs"
    show(arguments, response, Text(head, "bold"), draw_answer(response))


def _read_pairs(name: str) -> list[dict[str, Any]]:
    """Return the pairs of JSON lines, or of a JSON list. Raises LogsteerError for others."""
    pairs = []
    for where, pair in read_entries(name, _PAIR):
        found = pair if isinstance(pair, dict) else {}
        texts = {side: found[side] for side in _SIDES if isinstance(found.get(side), str | list)}
        if len(texts) < len(_SIDES):
            raise LogsteerError(f"{where}: no two texts or conversations; write {_PAIR}")
        pairs.append(texts)
    if not pairs:
        raise LogsteerError(f"{name} has no pairs")
    return pairs
