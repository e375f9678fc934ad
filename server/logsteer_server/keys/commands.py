"""`logsteer-server keys add|list|replace|revoke`: change a key file, which servers read again."""

import argparse
import sys
from pathlib import Path

from pydantic import ValidationError

from logsteer.cli.usage import Parser
from logsteer.schemas import SCOPES, KeyScope
from logsteer.schemas.faults import explain
from logsteer_server.keys.caller import KeyLimits
from logsteer_server.keys.keyring import (
    KeyEntry,
    change_keys,
    make_key,
    read_keys,
    replace_secret,
)
from logsteer_server.settings import ConfigurationError

CONCURRENCY = 64
"""Default concurrency of a key: more than a single client sends."""
STORED_BYTES = 8 * 2**30
"""Default storage of a key for each kind: one override of the largest size."""


def main(argv: list[str]) -> int:
    """Run one command; return the exit status, 2 for a failure."""
    arguments = _parse(argv)
    try:
        status: int = arguments.run(arguments)
    except (ConfigurationError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="logsteer-server keys",
        description="Change the file that the setting key_file names. A running server takes the "
        "change at once.",
    )
    commands = parser.add_subparsers(required=True, metavar="add|list|replace|revoke")
    add = commands.add_parser("add", help="make a key and print it, this once")
    add.set_defaults(run=_add)
    add.add_argument("name", help="whose it is; its vectors, overrides and adapters go by it")
    add.add_argument(
        "--scope", required=True, type=_read_scopes, metavar="SCOPE,…", help=", ".join(SCOPES)
    )
    add.add_argument(
        "--concurrency",
        type=int,
        default=CONCURRENCY,
        help="concurrent requests on each server (default %(default)s)",
    )
    add.add_argument("--tokens-per-minute", type=int, help="tokens given to engines")
    add.add_argument(
        "--stored-bytes",
        type=int,
        default=STORED_BYTES,
        help="bytes of its vectors, of its overrides, of its adapters (default %(default)s)",
    )
    add.add_argument(
        "--priority",
        choices=("interactive", "batch"),
        default="interactive",
        help="batch: its work lets that of others pass",
    )
    show = commands.add_parser("list", help="show every key, without secrets")
    show.set_defaults(run=_list)
    replace = commands.add_parser("replace", help="give a key another secret and print it")
    replace.set_defaults(run=_replace)
    revoke = commands.add_parser("revoke", help="have a key be refused from now on")
    revoke.set_defaults(run=_revoke)
    for command in (replace, revoke):
        command.add_argument("name")
    for command in (add, show, replace, revoke):
        command.add_argument("--file", type=Path, required=True, help="the key file")
    return parser.parse_args(argv)


def _read_scopes(text: str) -> tuple[KeyScope, ...]:
    given = set(filter(None, text.split(",")))
    if not given or given - set(SCOPES):
        raise argparse.ArgumentTypeError(f"{text}: give some of {','.join(SCOPES)}")
    return tuple(scope for scope in SCOPES if scope in given)


def _add(arguments: argparse.Namespace) -> int:
    """Add a key. Errors: ConfigurationError if the name exists or a limit is invalid."""
    names = KeyLimits.model_fields
    with change_keys(arguments.file) as keys:
        if any(key.name.casefold() == arguments.name.casefold() for key in keys):
            raise ConfigurationError(f"there is a key {arguments.name}; revoke it first")
        try:
            limits = KeyLimits(**{name: getattr(arguments, name) for name in names})
            entry, token = make_key(arguments.name, arguments.scope, limits, arguments.priority)
        except ValidationError as error:
            raise ConfigurationError(explain(error, KeyEntry)) from None
        keys.append(entry)
    return _show(token)


def _show(token: str) -> int:
    print(token)
    print("This is shown once: the file has a hash of it.", file=sys.stderr)
    return 0


def _list(arguments: argparse.Namespace) -> int:
    for key in read_keys(arguments.file)[0]:
        print(_describe(key))
    return 0


def _describe(key: KeyEntry) -> str:
    """Format a key as one line."""
    limits = [f"{name}={n}" for name, n in key.limits.model_dump(exclude_none=True).items()]
    return "  ".join(
        [key.name, f"ls_{key.id}_…", ",".join(key.scopes), key.priority, *limits, key.created]
    )


def _replace(arguments: argparse.Namespace) -> int:
    with change_keys(arguments.file) as keys:
        index = _locate(keys, arguments)
        keys[index], token = replace_secret(keys[index])
    return _show(token)


def _revoke(arguments: argparse.Namespace) -> int:
    with change_keys(arguments.file) as keys:
        del keys[_locate(keys, arguments)]
    print(f"{arguments.name} is revoked; what it stored stays, for a key of the same name.")
    return 0


def _locate(keys: list[KeyEntry], arguments: argparse.Namespace) -> int:
    """Return the index of a key by name. Errors: ConfigurationError."""
    names = [key.name for key in keys]
    if arguments.name not in names:
        raise ConfigurationError(f"{arguments.file} has no key {arguments.name}")
    return names.index(arguments.name)
