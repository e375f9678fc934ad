"""Jobs that differentiate the log-probability of targets.

Axis letters: T tokens, R scored rows, D width of an activation.
"""

from dataclasses import dataclass, field

from logsteer_server.contract.jobs import Feature, Ids, Job, Output, Scores, find_features
from logsteer_server.contract.plan import Direction, Positions


@dataclass(frozen=True, slots=True)
class InputPoint:
    """A point on the line between a baseline and the input: each token's embedding e is replaced by
    e' + alpha (e - e'), where e' is the embedding of the token `baseline`, and 0 without one.
    """

    alpha: float
    baseline: int | None = None


@dataclass(frozen=True, slots=True)
class GradientJob(Job):
    """One sequence, laid out as in `ScoreJob`; its summed target log-probability is differentiated.

    With respect to the activations at `sites`, (layer, hook) each, after the tokens at `positions`;
    or, with `along`, along that direction of the parameters. Both apply `plan`, `override` and
    `adapter`; an activation is the output of its site, steering included. Activations of more than
    `max_width` numbers are refused. Or, with `input_point`, with respect to the input embeddings
    there.
    """

    targets: Ids
    sites: tuple[tuple[int, str], ...] = ()
    positions: Positions = field(default_factory=Positions)
    along: Direction | None = None
    max_width: int | None = None
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

    `gradients` [T', D] in the order of the job's sites, T' the tokens at its positions;
    `directional` [R] where the job has a direction: of each target's log-probability.
    `attributions` [T] where it has an input point: each embedding's gradient times e - e'.
    """

    logprobs: Scores
    gradients: tuple[Scores, ...] = ()
    directional: Scores | None = None
    attributions: Scores | None = None
