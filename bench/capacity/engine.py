"""One replica's engine in the simulation: batches of jobs, by the time that steps are measured to
take, and a prefix cache.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from logsteer_server.contract.jobs import Job
from logsteer_server.engines.routing import BLOCK, hash_blocks


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds that a step takes: a fixed part, and parts for each token read, each sequence, and
    each pair of a token read with one before it, which attention looks at.
    """

    fixed_s: float
    token_s: float
    sequence_s: float = 0.0
    pair_s: float = 0.0

    def measure(self, tokens: float, sequences: float, pairs: float) -> float:
        """Return the seconds of a step."""
        own = self.fixed_s + self.token_s * tokens
        return own + self.sequence_s * sequences + self.pair_s * pairs

    def rate(self, step_tokens: float, read: float, found: float = 0.0) -> float:
        """Return the tokens read a second where all steps are full of texts of which so many tokens
        are read, behind others that are found in the cache.
        """
        texts = step_tokens / read
        return step_tokens / self.measure(step_tokens, texts, texts * count_pairs(found, read))


def count_pairs(before: float, read: float) -> float:
    """Return the pairs of tokens that attention looks at, where so many are read behind others."""
    return read * before + read * read / 2


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What a step takes in, and what the prefix cache holds."""

    cost: StepCost
    step_tokens: int = 8192
    step_sequences: int = 1024
    cache_tokens: int = 131_072


@dataclass(slots=True)
class _Reading:
    """A job that is read, and how many of its tokens are behind it."""

    key: Hashable
    job: Job
    done: int = 0
    is_begun: bool = False


@dataclass(slots=True)
class Step:
    """What one step did: its length, jobs that began and ended in it, tokens read and found."""

    seconds: float
    begun: list[Hashable]
    ended: list[Hashable]
    read_tokens: int
    cached_tokens: int


class SimulatedEngine:
    """Reads jobs in the order in which they come, as vLLM does: a step is filled with tokens of as
    many as fit, the last of which may be read in pieces. Whole blocks that were read are found
    again until others have taken their place; what is to be scored is read anyhow.
    """

    def __init__(self, shape: EngineShape) -> None:
        self._shape = shape
        self._waiting: deque[_Reading] = deque()
        self._blocks: OrderedDict[int, None] = OrderedDict()

    @property
    def busy(self) -> bool:
        """Whether a job is unfinished."""
        return bool(self._waiting)

    def add(self, keys: Sequence[Hashable], jobs: Sequence[Job]) -> None:
        """Take jobs in."""
        self._waiting.extend(map(_Reading, keys, jobs))

    def step(self) -> Step:
        """Return what the next step does, of the jobs that are there."""
        shape, step = self._shape, Step(0.0, [], [], 0, 0)
        room, sequences, pairs = shape.step_tokens, 0, 0.0
        while self._waiting and room and sequences < shape.step_sequences:
            own = self._waiting[0]
            if not own.is_begun:
                own.is_begun = True
                own.done = self._find(own.job)
                step.cached_tokens += own.done
                step.begun.append(own.key)
            taken = min(room, len(own.job.tokens) - own.done)
            pairs += count_pairs(own.done, taken)
            own.done += taken
            room -= taken
            sequences += 1
            if own.done == len(own.job.tokens):
                step.ended.append(own.key)
                self._waiting.popleft()
        step.read_tokens = shape.step_tokens - room
        step.seconds = shape.cost.measure(step.read_tokens, sequences, pairs)
        return step

    def _find(self, job: Job) -> int:
        """Return how many of a job's tokens are in the cache, and note all of them as there."""
        if len(job.tokens) < BLOCK:
            return 0
        blocks = hash_blocks(job)
        known = self._blocks
        usable = (job.prompt_len - 1) // BLOCK
        count = next((n for n, block in enumerate(blocks[:usable]) if block not in known), usable)
        for block in reversed(blocks):
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._shape.cache_tokens // BLOCK:
            known.popitem(last=False)
        return BLOCK * count

    def clear(self) -> None:
        """Lose everything: the process is gone."""
        self._waiting.clear()
        self._blocks.clear()
