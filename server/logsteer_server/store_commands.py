"""`logsteer-server store`: look after the stores of vectors, overrides and adapters.

Servers may run meanwhile. Exit status: 0 done; 1 damage was found, or a disk or bucket failed; 2
the arguments do not fit.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from logsteer.errors import APIError
from logsteer_server.settings import ConfigurationError, load_settings
from logsteer_server.stores.objects import Objects, refuse_old_layout
from logsteer_server.stores.store import GRACE_S, Store
from logsteer_server.stores.upkeep import open_stores, sweep


def main(argv: list[str]) -> int:
    """Run one command; return the exit status."""
    arguments = _parse_arguments(argv)
    grace_s = GRACE_S
    try:
        if arguments.directory is not None:
            objects = Objects(arguments.directory)
        elif arguments.config is not None:
            settings = load_settings(arguments.config)
            objects, grace_s = Objects.open(settings), settings.store_grace_s
        else:
            print("error: say where the stores are: --config or --directory", file=sys.stderr)
            return 2
        if objects.is_local:
            refuse_old_layout(objects.root)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        if arguments.command == "gc":
            for place in sweep(objects, grace_s):
                print(f"removed {place}: no name points to it")
            return 0
        counts = [_verify(store) for store in open_stores(objects, grace_s)]
    except APIError as error:
        print(f"error: {error.detail} {objects.trouble or ''}", file=sys.stderr)
        return 1
    return 1 if any(counts) else 0


def _parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="logsteer-server store",
        description="Look after stored vectors, overrides and adapters, while servers run or not. "
        "A directory is backed up by tar, names before contents; a bucket by its versioning.",
    )
    commands = parser.add_subparsers(
        title="commands", dest="command", required=True, metavar="COMMAND"
    )
    for name, text in (
        ("verify", "read every content against its SHA-256 and its card"),
        ("gc", "remove old contents that no name points to, and what was left over"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--config", type=Path, help="YAML file of the server")
        command.add_argument("--directory", type=Path, help="the store directory, without --config")
    return parser.parse_args(argv)


def _verify(store: Store[Any]) -> int:
    """Print what a store holds and what is wrong with it; return how much is."""
    listing = store.list_all()
    problems = [f"{name}: its card is damaged, or its content is gone" for name in listing.damaged]
    for card in listing.cards:
        try:
            store.check(store.look_up(card.name)[1])
        except APIError as error:
            if error.code != store.kind.unknown:  # deleted just now
                problems.append(f"{card.name}: {error.detail}")
    print(
        f"{store.prefix}{store.kind.plural}: {len(listing.cards)} names, "
        f"{listing.num_bytes} bytes, {len(problems)} problems"
    )
    for line in problems:
        print(f"  {line}")
    return len(problems)
