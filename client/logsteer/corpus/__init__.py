"""A file's rows through an endpoint, each exactly once: what `logsteer score-file` runs.

    source     rows of JSON lines or Parquet, as bytes of JSON
    form       what is asked of each row, and which item of the endpoint a row is
    answers    chunks of rows -> requests; their answers -> a line for each row
    record     lines as they are finished, how far they reach, the lock on both; the file of them
    job        all of it, in order and within bounds
    servers    one server or several: who is asked next, and how much at once

Several servers of one model share the rows of a file.
"""

from logsteer.corpus.answers import FileScores
from logsteer.corpus.job import JobLimits
from logsteer.corpus.servers import score_file

__all__ = ["FileScores", "JobLimits", "score_file"]
