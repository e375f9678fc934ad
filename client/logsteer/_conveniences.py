"""Methods of the clients that are written by hand, with the options of an endpoint.

Their signatures and docstrings are written by `_generator`; what they do, `_callers` says.
"""

from dataclasses import dataclass

from logsteer.schemas.chat import CHAT_FIELDS


@dataclass(frozen=True)
class Argument:
    """One parameter as it is written: its type, and its default, None where it is required."""

    name: str
    type: str
    description: str
    named: bool = False
    default: str | None = None


@dataclass(frozen=True)
class Convenience:
    """A method that is written by hand as `_NAME`, with options of an endpoint: all `without` some.

    `own` are its own parameters.
    """

    name: str
    endpoint: str
    own: tuple[Argument, ...]
    without: frozenset[str]
    answer: str
    summary: str
    notes: str = ""


_TARGETS = Argument("targets", "str | Sequence[str]", "Texts to score; one string is one target.")
_ITEMS = Argument(
    "items",
    "str | Sequence[str | ActivationItem | Mapping[str, Any]]",
    "Texts, one string being one text; or objects with `token_ids` or `messages`.",
)
_LAYERS = Argument(
    "layers", "Sequence[int] | None", "Layers to read, 0-based; None with `sae`.", False, "None"
)
CONVENIENCES = (
    Convenience(
        "score",
        "logprob",
        (Argument("context", "str", "The text before the targets."), _TARGETS),
        frozenset({"items", "on_error", *CHAT_FIELDS}),
        "ItemScore",
        "Score targets after one context: `logprob` for a single item.",
    ),
    Convenience(
        "get_log_prob",
        "logprob",
        (
            Argument("prompts", "str | Sequence[str]", "Contexts; one string is one prompt."),
            _TARGETS,
            Argument(
                "space",
                "SpacePolicy",
                "`best`: each target with or without one leading space, whichever is more "
                "probable; `both`: each of the two; or `as_given`.",
                True,
                '"best"',
            ),
        ),
        frozenset(
            {"items", "on_error", "columns", "policy", "top", "per_token", "probes", "space"}
            | {*CHAT_FIELDS}
        ),
        "LogProbs",
        "Return one record per prompt and target, prompt by prompt, in the order given.",
        "A record is a dictionary with attributes: prompt, target, sequence (the text that was "
        "scored), log_prob, prob, num_tokens, perplexity (exp of minus the summed log_prob), "
        "token_perplexity, boundary and log_prob_any_space. With space `both` a target has two: "
        "with one leading space, then without. One request scores them all; each prompt is "
        "computed once.",
    ),
    Convenience(
        "sample",
        "generate",
        (
            Argument(
                "source",
                "PromptSource",
                "A list of prompts or of rows, a path of JSON lines, or `KIND:NAME` of "
                "`logsteer.extras.datasets`.",
            ),
            Argument("field", "str", "The field that holds a row's prompt.", True, "PROMPT"),
            Argument("count", "int | None", "Prompts to draw; None: all in order.", True, "None"),
            Argument(
                "with_replacement", "bool", "Whether a prompt may be drawn again.", True, "False"
            ),
            Argument(
                "max_prompts_pool",
                "int | None",
                "Rows of the source that are drawn from, its first ones; None: all.",
                True,
                "None",
            ),
            Argument(
                "reward",
                "Reward | None",
                "Called with a row of the source, its prompt and the text of a continuation; "
                "returns a number, or what is awaited for it. `reward_error` of a sample says "
                "sample's `reward_error`.",
                True,
                "None",
            ),
            Argument("batch_size", "int", "Prompts of one request.", True, "32"),
            Argument("concurrency", "int", "Requests under way at once.", True, "4"),
            Argument(
                "max_failures",
                "int",
                "Failed requests in a row after which no further one is sent.",
                True,
                "8",
            ),
            Argument("progress", "bool", "Whether a terminal shows a bar.", True, "True"),
        ),
        frozenset({"prompts", "prompt_ids", "messages", "on_error"}),
        "Samples",
        "Continue prompts drawn from a source, and give each continuation its reward.",
        "Each of a prompt's `n` continuations has its own seed, which follows from `seed` (default "
        "0) and does not depend on the batch. A failed request loses its own prompts; a refused "
        "one is halved, until only the refused prompt is lost. A warning and the result's "
        "`failures` name them. Raises the first error if no sample was drawn. "
        "`logsteer.score_file` draws the same continuations of a file's prompts, and resumes where "
        "it was interrupted.",
    ),
    Convenience(
        "activations",
        "activations",
        (_ITEMS, _LAYERS),
        frozenset({"items", "layers"}),
        "Activations",
        "Return the activations of texts as numpy arrays: of each token, the last, or their mean.",
        "With `sae`, the strongest features of each token. A path is a text like any other here; "
        "`capture` reads files.",
    ),
    Convenience(
        "capture",
        "activations",
        (
            Argument(
                "source",
                "PromptSource",
                "A list of texts or of rows, a path of JSON lines, or `KIND:NAME` of "
                "`logsteer.extras.datasets`.",
            ),
            Argument("directory", "str | PathLike[str]", "Where the shards and their index go."),
            _LAYERS,
            Argument("field", "str", "The field that holds a row's text.", True, '"text"'),
            Argument("batch_size", "int", "Texts of one request and shard, at most.", True, "64"),
            Argument("progress", "bool", "Whether a terminal shows a bar.", True, "True"),
        ),
        frozenset({"items", "layers"}),
        "ActivationShards",
        "Write the activations of a source's texts to files in a directory, and return them.",
        "Each request's answer is a safetensors file; `index.json` lists the whole ones, and "
        "an interrupted capture resumes after them. To `activations` a file's path is a "
        "text; this method reads files.",
    ),
)
