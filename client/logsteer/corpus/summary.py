"""What there is to say of a job that is done."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from logsteer.corpus.answers import RowCounts
from logsteer.corpus.form import RowForm
from logsteer.schemas import TextScore
from logsteer.schemas.perplexity import TextResult, summarize_sums


class FileScores(BaseModel):
    """The summary of a file's rows. `failed` of the `rows` have an error in place of a result.

    Tokens are those of the answers that were written. `total` is of the texts of `perplexity`, all
    together. `seconds` are those of all runs of the job, `resumed_rows` were there at the beginning
    of the last one, and `retries` are calls that it made again.
    """

    endpoint: str
    model: str | None
    rows: int
    failed: int
    prompt_tokens: int
    scored_tokens: int
    generated_tokens: int
    total: TextScore | None = None
    seconds: float
    rows_per_s: float
    tokens_per_s: float
    resumed_rows: int = 0
    retries: int = 0
    answered_by: dict[str, Any] | None = Field(
        default=None, description="The model and what was changed of it, by digests."
    )


def sum_up(
    form: RowForm, tally: RowCounts, identity: Mapping[str, Any] | None, seconds: float
) -> FileScores:
    """Return the summary of a job's rows."""
    answered = tally.rows - tally.failed
    total = None
    if form.kind.result is TextResult and answered:
        total = TextScore(**summarize_sums(tally.sums))
    return FileScores(
        endpoint=form.endpoint,
        model=None if identity is None else identity["model"],
        rows=tally.rows,
        failed=tally.failed,
        **tally.usage,
        total=total,
        seconds=seconds,
        rows_per_s=tally.rows / max(seconds, 1e-9),
        tokens_per_s=tally.tokens / max(seconds, 1e-9),
        answered_by=None if identity is None else dict(identity),
    )
