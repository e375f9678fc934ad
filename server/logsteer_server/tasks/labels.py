"""`/v1/score`: probabilities of label tokens after a query and each of many items."""

import math
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import numpy as np

from logsteer.schemas.openai import ScoreRequest
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import ScoreJob, ScoreOutput
from logsteer_server.interventions.interventions import Interventions
from logsteer_server.settings import Settings
from logsteer_server.tasks.planning import Cover, ItemProblems, Planner
from logsteer_server.tasks.run import Batch, Collector, Facts, ShapedTask, check_count
from logsteer_server.tasks.targets import MAX_TARGETS
from logsteer_server.text.prompts import check_prompt, find_longest_prompt, fit_prompt
from logsteer_server.text.sums import log_sum_exp
from logsteer_server.text.tokenizer import ENCODED_AT_ONCE, TextCodec, check_ids, split_sizes


def plan_labels(
    request: ScoreRequest, codec: TextCodec, info: EngineInfo, cover: Cover
) -> list[ScoreJob]:
    """Plan one job per item, which scores all labels in its last row.

    Text is encoded with a BOS if the tokenizer adds one. Errors: APIError `invalid_request`,
    `context_too_long`.
    """
    check_ids(request.label_token_ids, info.vocab_size, "label_token_ids")
    labels = np.array(request.label_token_ids, dtype=np.int32)
    problems = ItemProblems("items")
    jobs: list[ScoreJob] = []
    num_planned = 0
    for index, ids in enumerate(_read_prompts(request, codec)):
        with problems.catch(index):
            check_prompt(None, ids, info.vocab_size)
            fit_prompt(ids, 0, info.context_length)
        jobs.append(ScoreJob(np.array(ids, np.int32), labels, shares_row=len(labels) > 1))
        num_planned += len(ids)
        cover(num_planned)
    return jobs


def _read_prompts(request: ScoreRequest, codec: TextCodec) -> Iterator[list[int]]:
    """Yield the tokens of query and item for each item, encoding few texts at a time.

    Otherwise a long query would be in memory once for each item.
    """
    items = [request.items] if isinstance(request.items, str) else request.items
    for part in split_sizes([len(request.query) + len(item) for item in items], ENCODED_AT_ONCE):
        texts: list[str] = []
        for item in items[part.start : part.stop]:
            first, second = (item, request.query) if request.item_first else (request.query, item)
            if isinstance(item, str):
                texts.append(f"{first or ''}{second or ''}")
            else:
                yield [*first, *second]
        yield from codec.encode_prompts(texts, "auto")


def weigh_labels(output: ScoreOutput, apply_softmax: bool) -> list[float | None]:
    """Return the labels' probabilities, over the vocabulary, or with softmax among the labels.

    None for a NaN; with softmax, None for all labels if one is NaN or all are impossible.
    """
    logprobs = output.columns["logprob"].astype(np.float64).tolist()
    total = log_sum_exp(logprobs) if apply_softmax else 0.0
    if not math.isfinite(total):  # a NaN, or all labels are impossible
        return [None] * len(logprobs)
    return [None if math.isnan(v) else math.exp(v - total) for v in logprobs]


class LabelTask(ShapedTask[ScoreRequest]):
    """Probabilities of label tokens after a query and each item, in SGLang's shape."""

    kind = "score"
    shape = "scoring"

    _scores: list[list[float | None]]

    def check_limits(self, settings: Settings) -> None:
        """Bound items and labels. Errors: APIError `payload_too_large`."""
        items = self._body.items
        count = 1 if isinstance(items, str) else len(items)
        check_count("items", count, settings.max_items)
        rows = count * len(self._body.label_token_ids)
        check_count("items x label_token_ids", rows, MAX_TARGETS)

    async def plan(self, planner: Planner) -> AsyncGenerator[Batch, None]:
        """Score all items in one batch; the prefix cache serves their common prefix."""
        body, items = self._body, self._body.items
        planner.cover_text(
            len(body.query) + find_longest_prompt([items] if isinstance(items, str) else items)
        )
        jobs = await planner.run(self._plan, planner)
        planner.expect_rows(sum(job.num_scored for job in jobs), 1)
        collector = Collector()
        yield Batch(jobs, collector.take, cache=True)
        self._scores = [
            weigh_labels(output, self._body.apply_softmax) for output in collector.outputs
        ]

    def _plan(self, planner: Planner) -> Sequence[ScoreJob]:
        self.interventions = Interventions.resolve(self._body, self._stores, self.info, self.codec)
        jobs = plan_labels(self._body, self.codec, self.info, planner.cover)
        return self.interventions.apply(jobs)

    def report(self) -> dict[str, Any]:
        """Return the scores of each item, with a flag if some are null."""
        flagged = any(score is None for scores in self._scores for score in scores)
        return {"scores": self._scores} | ({"flags": ["non_finite"]} if flagged else {})

    def _count_usage(self, facts: Facts) -> dict[str, Any]:
        read, cached = facts.usage["prompt_tokens"], facts.usage["cached_tokens"]
        return {
            "prompt_tokens": read,
            "completion_tokens": 0,
            "total_tokens": read,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
