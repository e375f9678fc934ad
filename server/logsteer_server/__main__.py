"""`logsteer-server`: start the service, or change its keys.

Every engine process imports this module again before it does anything else, and must not have to
wait for what only the HTTP process needs: so that is imported where it is run.
"""

import sys

from logsteer_server.imports import hold_collector


def main(argv: list[str] | None = None) -> int:
    """Change keys, or run the server until it is interrupted; return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["keys"]:
        from logsteer_server.keys import commands

        return commands.main(argv[1:])
    with hold_collector():
        from logsteer_server import serving

    return serving.main(argv)


if __name__ == "__main__":
    sys.exit(main())
