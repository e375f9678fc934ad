"""Failures of jobs for which an engine raised an unexpected error."""

import logging

from logsteer_server.contract.jobs import JobFailure

log = logging.getLogger(__name__)


MEMORY_WORDS = (
    "out of memory",  # CUDA's
    "allocate memory",  # torch's allocator for CPUs
    "not enough memory",
    "Free memory on device",  # vLLM's checks at a start
    "Available memory on node",
    "Error in memory profiling",
)


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error, or one in its chain of causes, reports a lack of memory."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, MemoryError) or "OutOfMemory" in type(link).__name__:
            return True
        if any(words in str(link) for words in MEMORY_WORDS):
            return True
        link = link.__cause__ or link.__context__
    return False


def describe_error(error: Exception) -> JobFailure:
    """Return the failure of a job for which an error was raised, and log the error.

    A retry helps only if memory ran out. A missing file was deleted with its request, which was
    cancelled, so its failure is not logged.
    """
    if isinstance(error, FileNotFoundError):
        return JobFailure("internal", f"{error.filename} is gone: the request was cancelled")
    log.error("a job failed in the engine", exc_info=error)
    name = type(error).__name__
    if lacks_memory(error):
        detail = f"memory ran out over this request ({name}); send less at once, or try later"
        return JobFailure("out_of_memory", detail)
    detail = f"the engine failed over this request ({name}); report it with the server's log"
    return JobFailure("internal", detail)
