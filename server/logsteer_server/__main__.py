"""`logsteer-server`: start the service; `logsteer-server keys`: change its keys.

Every engine process imports this module again before it does anything else, and must not have to
wait for what only the HTTP process needs: so that is imported where it is run.
"""

import sys


def main(argv: list[str] | None = None) -> int:
    """Run the server until it is interrupted, or a command; return the exit status."""
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == ["keys"]:
        from logsteer_server.keys import commands

        return commands.main(given[1:])
    from logsteer_server import serving

    return serving.main(given)


if __name__ == "__main__":
    sys.exit(main())
