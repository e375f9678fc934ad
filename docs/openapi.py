"""The OpenAPI document, written from the schemas: `python -m docs.openapi`."""

import argparse
import json
import sys
from pathlib import Path

from logsteer_server.app import create_app
from logsteer_server.settings import ModelSettings, Settings


def render() -> str:
    """Render the document as JSON text."""
    settings = Settings(models=[ModelSettings(id="any", path="any")])
    return json.dumps(create_app(settings).openapi(), indent=1, sort_keys=True) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Write the document to stdout, or with --check FILE compare; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m docs.openapi")
    parser.add_argument("--check", type=Path, metavar="FILE", help="fail where FILE differs")
    arguments = parser.parse_args(argv)
    if arguments.check is None:
        sys.stdout.write(render())
        return 0
    if arguments.check.read_text() == render():
        return 0
    sys.stderr.write(f"{arguments.check} is stale: run `make openapi` and commit it\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
