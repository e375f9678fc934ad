"""The settings as options of the command line: under their own names, and under vLLM's."""

import argparse
import re
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from logsteer.cli.usage import Parser
from logsteer_server.engines.vllm.arguments import REFUSED
from logsteer_server.settings import ModelSettings

VLLM_FLAGS: Mapping[str, Sequence[str]] = {
    "id": ("--served-model-name",),
    "quantization": ("-q",),
    "memory": ("--gpu-memory-utilization", "--device-memory-utilization"),
    "devices": ("--device-ids",),
    "tensor_parallel": ("--tensor-parallel-size", "-tp"),
    "pipeline_parallel": ("--pipeline-parallel-size", "-pp"),
    "replicas": ("--data-parallel-size", "-dp"),
    "adapter_slots": ("--max-loras",),
    "adapter_rank": ("--max-lora-rank",),
}
"""Setting of a model -> vLLM's flags that take the same value."""

SWITCHES: Mapping[str, tuple[str, Any]] = {
    "--enforce-eager": ("compile", False),
    "--enable-lora": ("adapter_slots", 1),
}
"""Flag of vLLM without a value -> the setting that it stands for, unless that is given, too."""

INSTEAD: Mapping[str, str] = {
    "model": "give MODEL without a flag",
    "chat_template": "store it in the checkpoint as chat_template.jinja",
    "lora_modules": "PUT /adapters/NAME; requests and variants name it",
    "enable_auto_tool_choice": "tool calls are read where the template writes them; leave it out",
    "tool_call_parser": "tool calls are read where the template writes them; leave it out",
    "max_logprobs": "requests may ask for any number; leave it out",
    "ssl_keyfile": "put a proxy with TLS before the server",
    "ssl_certfile": "put a proxy with TLS before the server",
    "root_path": "have the proxy remove the prefix",
}
"""Argument of vLLM's server that no setting stands for -> what to do."""


def add_settings(
    parser: argparse.ArgumentParser, kind: type[BaseModel], topics: Mapping[str, str]
) -> None:
    """Add an option for every setting of a class, but those of a file alone, in groups by topic."""
    for topic, names in topics.items():
        group = parser.add_argument_group(topic)
        for name in names.split():
            if name not in ("path", "models", "variants"):
                _add_setting(group, name, kind.model_fields[name])


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of vLLM's that stand for an argument of the engine, or have no value."""
    group = parser.add_argument_group("Of vLLM")
    group.add_argument("--revision", help="branch, tag or commit of each MODEL on the hub")
    group.add_argument(
        "--tokenizer", dest="engine_args", action="append", type=lambda text: ("tokenizer", text),
        metavar="TOKENIZER", help="the same as --engine-arg tokenizer=TOKENIZER",
    )  # fmt: skip
    group.add_argument(
        "--trust-remote-code", dest="engine_args", action="append_const",
        const=("trust_remote_code", True), help="the same as --engine-arg trust_remote_code=true",
    )  # fmt: skip
    for flag, (name, value) in SWITCHES.items():
        group.add_argument(
            flag, action="append_const", dest="switches", const=(name, value), default=[],
            help=f"the same as {name}: {value}",
        )  # fmt: skip


def _add_setting(group: Any, name: str, field: FieldInfo) -> None:
    flag, options = f"--{name.replace('_', '-')}", dict[str, Any](dest=name)
    if get_origin(field.annotation) is dict:
        flag = flag.removesuffix("s")
        options |= {"action": "append", "metavar": "NAME=VALUE", "type": _read_pair}
    elif field.annotation is bool:
        options |= {"action": argparse.BooleanOptionalAction}
    elif get_origin(field.annotation) is Literal:
        values = get_args(field.annotation)
        options |= {"type": type(values[0]), "choices": values}
    else:
        options |= {"type": partial(_read_value, field), "metavar": name.upper()}
    words = (field.description or "").replace("%", "%%")
    group.add_argument(flag, *VLLM_FLAGS.get(name, ()), help=words, **options)


def _read_yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _read_pair(text: str) -> tuple[str, Any]:
    name, is_pair, value = text.partition("=")
    if not is_pair:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name.replace("-", "_"), _read_yaml(value)


def _read_value(field: FieldInfo, text: str) -> Any:
    """Return what a text means for a setting: as YAML, as it is, or as a list with commas."""
    kind: Any = Annotated
    adapter: TypeAdapter[Any] = TypeAdapter(kind[(field.annotation, "a setting", *field.metadata)])
    reasons = []
    for value in (_read_yaml(text), text, [_read_yaml(part) for part in text.split(",")]):
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            reasons.append(error.errors(include_input=False)[0]["msg"])
    raise argparse.ArgumentTypeError(reasons[0])


def read_settings(arguments: argparse.Namespace, kind: type[BaseModel]) -> dict[str, Any]:
    """Return the settings of a class that the command line gives."""
    given = dict(arguments.switches) if kind is ModelSettings else {}
    for name, field in kind.model_fields.items():
        if (value := getattr(arguments, name, None)) is not None:
            given[name] = dict(value) if get_origin(field.annotation) is dict else value
    return given


class ServerParser(Parser):
    """A parser that names the replacement of a flag of vLLM."""

    def error(self, message: str) -> NoReturn:
        """Tell what is wrong, and what to do instead; exit with 2."""
        found = re.match(r"unknown: --(?:no-)?([\w-]+)", message)
        if found and (instead := explain_flag(found[1].replace("-", "_"))):
            self.exit(2, f"error: {message}\n{instead}. See {self.prog} --help\n")
        if re.match(r"unknown: (true|false)\b", message, re.I):
            message += "; a switch such as --compile takes no value, its opposite is --no-compile"
        super().error(message)


def explain_flag(name: str) -> str | None:
    """Return what to do instead of an argument of vLLM's; None where it has none of that name."""
    if name in INSTEAD or name in REFUSED:
        return INSTEAD.get(name) or f"not taken: {REFUSED[name]}"
    package = find_spec("vllm")
    if package is None or package.origin is None:
        return None
    source = Path(package.origin).with_name("engine") / "arg_utils.py"
    arguments = re.findall(r"(?m)^    (\w+): ", source.read_text())
    return f"give --engine-arg {name}=VALUE" if name in arguments else None
