"""`logsteer-server`: start the service.

Every engine process imports this module again before it does anything else, and must not have to
wait for what only the HTTP process needs: so that is imported where it is run.
"""

import sys


def main(argv: list[str] | None = None) -> int:
    """Run the server until it is interrupted; return the exit status."""
    from logsteer_server import serving

    return serving.main(argv)


if __name__ == "__main__":
    sys.exit(main())
