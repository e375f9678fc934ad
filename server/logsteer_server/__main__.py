"""`logsteer-server`: start the service, or run one of its commands.

Every engine process imports this module again before it does anything else, and must not have to
wait for what only the HTTP process needs: so that is imported where it is run.
"""

import sys
from importlib import import_module

from logsteer_server.imports import hold_collector

COMMANDS = {
    "doctor": "logsteer_server.doctor",
    "keys": "logsteer_server.keys.commands",
}
"""First argument -> the module whose `main` gets the others."""


def main(argv: list[str] | None = None) -> int:
    """Run a command, or else the server until it is interrupted; return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        status: int = import_module(COMMANDS[argv[0]]).main(argv[1:])
        return status
    with hold_collector():
        from logsteer_server import serving

    return serving.main(argv)


if __name__ == "__main__":
    sys.exit(main())
