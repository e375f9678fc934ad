"""`logsteer-server store`: look after the stores of vectors, overrides and adapters.

Servers may run meanwhile. Exit status: 0 done; 1 damage was found, or kept something from being
done; 2 the arguments do not fit.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from logsteer.errors import APIError
from logsteer_server.settings import ConfigurationError, Settings, load_settings
from logsteer_server.stores.backup import BackupError, back_up, restore
from logsteer_server.stores.places import BucketPlace, DirectoryPlace, StorePlace


def main(argv: list[str]) -> int:
    """Run one command; return the exit status."""
    arguments = _parse_arguments(argv)
    try:
        settings = load_settings(arguments.config) if arguments.config else None
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    root = arguments.directory or (settings.store_path if settings else None)
    if root is None:
        print("error: say where the stores are: --config or --directory", file=sys.stderr)
        return 2
    shared = settings.shared_store if settings and arguments.directory is None else None
    run: Callable[[StorePlace, Settings | None, argparse.Namespace], int] = arguments.run
    try:
        place = DirectoryPlace(root) if shared is None else BucketPlace(shared)
        return run(place, settings, arguments)
    except (BackupError, ConfigurationError) as error:
        print(f"error: {error}", file=sys.stderr)
    except APIError as error:
        print(f"error: {error.detail}", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.filename or root}: {error.strerror or error}", file=sys.stderr)
    return 1


def _parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="logsteer-server store",
        description="Look after stored vectors, overrides and adapters, while servers run or not.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", type=Path, help="YAML file of the server")
    common.add_argument("--directory", type=Path, help="the store directory, without --config")

    def add(name: str, run: Callable[..., int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, parents=[common], help=text, description=text)
        command.set_defaults(run=run)
        return command

    add("verify", _verify, "read every content against its SHA-256 and its card")
    gc = add("gc", _collect, "remove contents that no name points to, and what was left over")
    gc.add_argument(
        "--damaged",
        action="store_true",
        help="remove damaged cards too, and the contents that may be theirs",
    )
    backup = add("backup", _back_up, "write all stores to one tar file, each as of one moment")
    backup.add_argument("file", type=Path, metavar="FILE")
    backup.add_argument("--force", action="store_true", help="overwrite the file")
    again = add("restore", _restore, "give the names of a backup their contents again")
    again.add_argument("file", type=Path, metavar="FILE")
    again.add_argument(
        "--force", action="store_true", help="overwrite names that have another content now"
    )
    return parser.parse_args(argv)


def _verify(place: StorePlace, _settings: Settings | None, _arguments: argparse.Namespace) -> int:
    num_problems = 0
    for report in place.verify():
        print(
            f"{report.place}: {report.names} names, {report.contents} contents, "
            f"{report.num_bytes} bytes, {len(report.problems)} problems"
        )
        for line in report.problems + report.notes:
            print(f"  {line}")
        num_problems += len(report.problems)
    return 1 if num_problems else 0


def _collect(place: StorePlace, _settings: Settings | None, arguments: argparse.Namespace) -> int:
    for line in place.collect(damaged=arguments.damaged):
        print(line)
    return 0


def _back_up(place: StorePlace, _settings: Settings | None, arguments: argparse.Namespace) -> int:
    if arguments.file.exists() and not arguments.force:
        raise BackupError(f"{arguments.file} is there already; --force overwrites it")
    for line in back_up(place.back_up, arguments.file):
        print(line)
    return 0


def _restore(place: StorePlace, settings: Settings | None, arguments: argparse.Namespace) -> int:
    bounds = {}
    if settings is not None:
        bounds = {
            "vectors": settings.vector_store_bytes,
            "overrides": settings.override_store_bytes,
            "adapters": settings.adapter_store_bytes,
        }
    for line in restore(arguments.file, place.open_store, bounds, force=arguments.force):
        print(line)
    return 0
