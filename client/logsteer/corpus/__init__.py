"""A file's rows through an endpoint, each exactly once: what `logsteer score-file` runs.

    rows       which item of the endpoint a row is
    answers    chunks of rows -> requests; their answers -> a line for each row
    record     lines as they are finished, how far they reach, the lock on both; the file of them
    job        all of it, in order and within bounds, over one server or several

Several servers of one model share the rows of a file.
"""

from logsteer.corpus.answers import FileScores
from logsteer.corpus.job import JobLimits, score_file

__all__ = ["FileScores", "JobLimits", "score_file"]
