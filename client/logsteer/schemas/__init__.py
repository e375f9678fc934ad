"""Every message of the HTTP interface, as pydantic models.

The server validates with these, the client parses with them, and `openapi.json` is generated
from them: they are the only place where the contract is written down.
"""

from logsteer.schemas.common import (
    Answer,
    BosPolicy,
    Column,
    EngineKind,
    Message,
    OverflowPolicy,
    Provenance,
    RequestOptions,
    RowOptions,
    Timing,
    TopAlternatives,
    Usage,
)
from logsteer.schemas.logprob import (
    Boundary,
    BoundaryFinding,
    ItemScore,
    LogprobAnswer,
    LogprobItem,
    LogprobRequest,
    SpacePolicy,
    SpaceVariants,
    TargetScore,
)
from logsteer.schemas.operations import Health, ModelCard, ModelList, ModelState, Readiness
from logsteer.schemas.perplexity import (
    Divergence,
    PerplexityAnswer,
    PerplexityRequest,
    PerplexityStreamQuery,
    Protocol,
    TextScore,
    TokenScores,
    WindowEvent,
    WindowScore,
)
from logsteer.schemas.problem import Problem, ProblemCode
from logsteer.schemas.tokens import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)

__all__ = [
    "Answer",
    "BosPolicy",
    "Boundary",
    "BoundaryFinding",
    "Column",
    "DetokenizeAnswer",
    "DetokenizeRequest",
    "Divergence",
    "EngineKind",
    "Health",
    "ItemScore",
    "LogprobAnswer",
    "LogprobItem",
    "LogprobRequest",
    "Message",
    "ModelCard",
    "ModelList",
    "ModelState",
    "OverflowPolicy",
    "PerplexityAnswer",
    "PerplexityRequest",
    "PerplexityStreamQuery",
    "Problem",
    "ProblemCode",
    "Protocol",
    "Provenance",
    "Readiness",
    "RequestOptions",
    "RowOptions",
    "SpacePolicy",
    "SpaceVariants",
    "TargetScore",
    "TextScore",
    "Timing",
    "TokenScores",
    "TokenizeAnswer",
    "TokenizeRequest",
    "TopAlternatives",
    "Usage",
    "WindowEvent",
    "WindowScore",
]
