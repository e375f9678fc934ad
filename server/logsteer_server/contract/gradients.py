"""Jobs that differentiate the log-probability of targets.

Axis letters: T tokens, R scored rows, D width of an activation.
"""

from dataclasses import dataclass, field

from logsteer_server.contract.jobs import Feature, Ids, Job, Output, Scores, find_features
from logsteer_server.contract.plan import Direction, Positions


@dataclass(frozen=True, slots=True)
class InputPoint:
    """A point on the line from a baseline to the input, for integrated gradients.

    Each token's embedding e is replaced by e' + alpha (e - e'), where e' is the embedding of the
    token `baseline`, or 0 without one.
    """

    alpha: float
    baseline: int | None = None


@dataclass(frozen=True, slots=True)
class GradientJob(Job):
    """One sequence, laid out as in `ScoreJob`; its summed target log-probability is differentiated.

    It is differentiated with respect to the activations at `sites`, (layer, hook) each, of the
    tokens at `positions`; or with `along`, along that direction of the parameters; or with
    `input_point`, with respect to the input embeddings at that point. `plan`, `override` and
    `adapter` apply; an activation is the output of its site after steering.
    """

    targets: Ids
    sites: tuple[tuple[int, str], ...] = ()
    positions: Positions = field(default_factory=Positions)
    along: Direction | None = None
    input_point: InputPoint | None = None

    @property
    def prompt_len(self) -> int:
        """Tokens before the scored ones."""
        return len(self.tokens) - (len(self.targets) - 1)

    @property
    def num_scored(self) -> int:
        """Tokens whose log-probability is read."""
        return len(self.targets)

    @property
    def features(self) -> tuple[Feature, ...]:
        """The engine features that the job needs."""
        return ("gradient", *find_features(self))


@dataclass(frozen=True, slots=True)
class GradientOutput(Output):
    """Log-probabilities [R] of the targets, and their derivatives.

    `gradients`: [T', D] for each of the job's sites, with T' tokens at its positions.
    `directional` [R]: with a direction, the derivative of each target's log-probability.
    `attributions` [T]: with an input point, each embedding's gradient times e - e'.
    """

    logprobs: Scores
    gradients: tuple[Scores, ...] = ()
    directional: Scores | None = None
    attributions: Scores | None = None
