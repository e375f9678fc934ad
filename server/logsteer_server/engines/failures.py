"""What a job fails with where an engine raised over it what it should not have."""

import logging

from logsteer_server.contract.jobs import JobFailure
from logsteer_server.engines.process import lacks_memory

log = logging.getLogger(__name__)


def describe_error(error: Exception) -> JobFailure:
    """Return the failure of the job over which an error was raised, and log the error.

    Trying again helps where memory ran out, and nowhere else.
    """
    log.error("a job failed in the engine", exc_info=error)
    name = type(error).__name__
    if lacks_memory(error):
        detail = f"memory ran out over this request ({name}); send less at once, or try later"
        return JobFailure("out_of_memory", detail)
    detail = f"the engine failed over this request ({name}); report it with the server's log"
    return JobFailure("internal", detail)
