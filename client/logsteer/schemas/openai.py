"""The shapes of OpenAI's interface that the server answers in, for clients that exist already.

What a client sends is honoured or refused by name: unknown fields, and those of OpenAI's that would
change the answer and are not supported. Such a field is taken where its value asks for nothing, and
null stands for a field that is left out.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, TypeAdapter, model_validator

from logsteer.schemas.chat import ChatFields, Message
from logsteer.schemas.common import (
    MAX_COUNT,
    Count,
    DrawOptions,
    Float,
    Index,
    NamedRefusals,
    ProbeReadings,
    Reply,
    Request,
    SpecialTokens,
    TokenActivations,
    TokenId,
    name_refusal,
)
from logsteer.schemas.interventions import (
    ActivationFields,
    AppliedInterventions,
    CapturingAnswer,
    InterventionFields,
)

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class Unsupported(NamedTuple):
    """Why a field of OpenAI's is not honoured, and the values beside null that ask for nothing."""

    reason: str
    off: tuple[object, ...] = ()


LABELS = frozenset({
    "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "session_id", "spaces_between_special_tokens", "include_reasoning",
})  # fmt: skip
"""Fields that change no answer here: they say something of the caller, or of other tokenizers and
models.
"""
MAX_TEMPLATE = 2**16
"""Characters of a request's own chat template."""
COMMON_ELSEWHERE = "OpenAI's shape has no place for it; send /logprob or /generate"
_TOOLS = "its successors are taken: send tools and tool_choice"
_NO_SEARCH = "nothing is searched here; leave it out"
_TEXT_ALONE = "text is read and written, and nothing else; leave it out"
_ONE_SERVER = "keys and values stay on this server; leave it out"
_OF_VLLM: Mapping[str, Unsupported] = {
    "use_beam_search": Unsupported(_NO_SEARCH, (False,)),
    "length_penalty": Unsupported(_NO_SEARCH, (1,)),
    "watermarking": Unsupported("text is drawn as the policy says; leave it out", (False,)),
    "truncation_side": Unsupported("prompts are cut at the left; leave it out", ("left",)),
    "prompt_embeds": Unsupported("a prompt is text or token ids"),
    "routed_experts_prompt_start": Unsupported(
        "answers have no routed experts; leave it out", (0,)
    ),
    "return_token_offsets": Unsupported("/tokenize gives offsets", (False,)),
    "return_prompt_text": Unsupported("/tokenize and /detokenize give it", (False,)),
    "mm_payload": Unsupported(_TEXT_ALONE, ("tensors",)),
    "return_mm_kwargs": Unsupported(_TEXT_ALONE, (False,)),
    "media_io_kwargs": Unsupported(_TEXT_ALONE, ({},)),
    "mm_processor_kwargs": Unsupported(_TEXT_ALONE, ({},)),
    "kv_transfer_params": Unsupported(_ONE_SERVER),
    "ec_transfer_params": Unsupported(_ONE_SERVER),
    "vllm_xargs": Unsupported("no processor reads it here; leave it out", ({},)),
    "repetition_detection": Unsupported("send stop strings or penalties"),
    "thinking_token_budget": Unsupported("send max_tokens", (-1,)),
    "stream_interval": Unsupported("a stream has a piece a token; leave it out", (1,)),
}
"""Fields of vLLM 0.32's requests, whose neutral values ask for nothing."""


class StreamOptions(Request):
    """What a stream has beside its pieces."""

    include_usage: bool = Field(
        default=False, description="End with a chunk that has no choice, and the usage."
    )
    continuous_usage_stats: bool | None = Field(
        default=False, description="With `include_usage`: the usage so far in each chunk, too."
    )
    include_obfuscation: Literal[False] | None = None


class CompatibleRequest(InterventionFields, NamedRefusals):
    """Fields that all of these requests share; interventions are logsteer's."""

    refused: ClassVar[dict[str, str]] = dict.fromkeys(
        ("columns", "policy", "precision", "on_overflow", "on_error", "cache", "bos"),
        COMMON_ELSEWHERE,
    )
    unsupported: ClassVar[Mapping[str, Unsupported]] = {}

    model: str | None = None
    special_tokens: SpecialTokens = "parse"

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = cls.model_fields.keys() | cls.unsupported.keys()
        kept = {
            name: value
            for name, value in data.items()
            if name not in LABELS and not (value is None and name in known)
        }
        asked = {
            name: reason
            for name, (reason, off) in cls.unsupported.items()
            if name in kept and kept.pop(name) not in off
        }
        if asked:
            raise name_refusal(asked)
        return kept


class JsonSchemaFormat(Request):
    """A JSON Schema that a reply follows."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(default=None, description="It is forced in any case.")


class ResponseFormat(Request):
    """The form of a reply: any text, any JSON object, an instance of a JSON Schema, or a match of
    a regular expression.
    """

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchemaFormat | None = None
    pattern: str | None = Field(default=None, description="Of type `regex`.")

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        for name, kind in (("json_schema", "json_schema"), ("pattern", "regex")):
            if (getattr(self, name) is None) == (self.type == kind):
                raise name_refusal({"response_format": f"type {kind} goes with {name}"})
        return self

    @property
    def forces(self) -> bool:
        """Whether it is another form than any text."""
        return self.type != "text"


_CHOICES = TypeAdapter(Annotated[list[str], Field(min_length=1)])


def _read_structured(given: Any) -> dict[str, Any]:
    """Return vLLM's `structured_outputs` as a `response_format`."""
    asked = {name: value for name, value in dict(given).items() if value not in (None, False)}
    if asked == {"json_object": True}:
        return {"type": "json_object"}
    if asked.keys() == {"regex"}:
        return {"type": "regex", "pattern": asked["regex"]}
    if asked.keys() == {"choice"}:
        texts = _CHOICES.validate_python(asked["choice"])
        return {"type": "regex", "pattern": "|".join(map(re.escape, texts))}
    if asked.keys() != {"json"}:
        reason = "send one of json, json_object, regex and choice, and nothing beside it"
        raise name_refusal({"structured_outputs": reason})
    schema = asked["json"]
    schema = json.loads(schema) if isinstance(schema, str) else schema
    return {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}


class SamplingRequest(CompatibleRequest, ActivationFields, DrawOptions):
    """Fields that completions and chat completions share, of OpenAI's and of vLLM's."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = _OF_VLLM

    top_k: int = Field(default=0, ge=-1, le=MAX_COUNT, description="0 or -1: every token.")
    include_stop_str_in_output: bool = Field(
        default=False, description="Keep what ended a completion in its text."
    )
    skip_special_tokens: bool = Field(
        default=True, description="Leave special tokens out of the text."
    )
    truncate_prompt_tokens: int | None = Field(
        default=None,
        ge=-1,
        le=MAX_COUNT,
        description="Read the last so many tokens of a prompt; -1: as many as fit.",
    )
    prompt_logprobs: int | None = Field(
        default=None,
        ge=-1,
        le=MAX_COUNT,
        description="Log-probabilities of the prompt's tokens, and so many alternatives for each; "
        "-1: all tokens of the vocabulary.",
    )
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = Field(
        default="processed_logprobs",
        description="Of `prompt_logprobs`: at the request's own temperature (0 counts as 1), "
        "without penalties and cuts; or at temperature 1.",
    )
    logprob_token_ids: list[TokenId] | None = Field(
        default=None,
        max_length=128,
        description="With `logprobs`: list the log-probabilities of these tokens at each one that "
        "is generated, in place of the most probable ones.",
    )
    return_token_ids: bool = Field(
        default=False, description="Give the ids of the prompt and of the completion."
    )
    response_format: ResponseFormat | None = Field(
        default=None,
        description="Force the reply into this form. vLLM's `structured_outputs` with `json`, "
        "`json_object`, `regex` or `choice` is the same.",
    )
    request_id: str | None = Field(
        default=None, max_length=128, description="What the answer's id ends with."
    )
    priority: int = Field(
        default=0, ge=-(2**63), lt=2**63, description="Above 0: as priority batch."
    )
    cache_salt: str | None = Field(
        default=None,
        min_length=1,
        max_length=1024,
        description="Share cached prefixes and results with requests of the same salt alone.",
    )
    n: int = Field(default=1, ge=1, le=1024)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | Annotated[list[str], Field(max_length=64)] | None = None
    ignore_eos: bool = Field(default=False, description="Continue after the end of sequence.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_tokens_as_token_ids: bool = Field(
        default=False, description="Name tokens by their ids in `logprobs`: `token_id:123`."
    )

    @model_validator(mode="before")
    @classmethod
    def _read_vllms_form(cls, data: Any) -> Any:
        if isinstance(data, dict) and "structured_outputs" in data:
            given = data["structured_outputs"]
            data = {n: v for n, v in data.items() if n != "structured_outputs"}
            if given is not None:
                data["response_format"] = _read_structured(given)
        return data

    @model_validator(mode="after")
    def _options_are_those_of_a_stream(self) -> "SamplingRequest":
        if self.stream_options is not None and not self.stream:
            raise name_refusal({"stream_options": "goes with stream: true; leave out one of them"})
        if self.prompt_logprobs is not None and self.stream:
            raise name_refusal({"prompt_logprobs": "a stream has none; leave out one of them"})
        asked = getattr(self, "logprobs", None)
        if self.logprob_token_ids and (asked is None or asked is False):
            raise name_refusal({"logprob_token_ids": "goes with logprobs; send both"})
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings that end a completion, empty ones left out."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in given if text)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(SamplingRequest):
    """`POST /v1/completions`: prompts as text or token ids, one or several."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **_OF_VLLM,
        "best_of": Unsupported("every completion is given, not the best; send n", (1,)),
        "suffix": Unsupported("nothing is inserted before other text; leave it out", ("",)),
    }

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    max_tokens: Index = 16
    echo: bool = Field(default=False, description="Give the prompt back before the completion.")
    logprobs: int | None = Field(default=None, ge=0, le=1000, description="Alternatives a token.")
    add_special_tokens: bool = Field(
        default=True, description="Put a BOS before text where the tokenizer does."
    )

    @model_validator(mode="after")
    def _has_something_to_do(self) -> "CompletionRequest":
        if not self.prompt or (isinstance(self.prompt, list) and "" in self.prompt):
            raise name_refusal({"prompt": "it is empty: give text or token ids"})
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise name_refusal(
                {"max_tokens": "0 without echo asks for nothing; set one of max_tokens and echo"}
            )
        if self.echo and self.logprob_token_ids:
            reason = "they are of generated tokens; leave out echo, or send /logprob"
            raise name_refusal({"logprob_token_ids": reason})
        for name in ("probes", "capture"):
            if (self.echo or not self.max_tokens) and getattr(self, name) is not None:
                reason = (
                    "it reads where tokens are generated: draw some without echo, or send /logprob"
                )
                raise name_refusal({name: reason})
        return self


class FunctionName(Request):
    """A function by name."""

    name: str


class NamedChoice(Request):
    """The one function that is called."""

    type: Literal["function"]
    function: FunctionName


class ChatCompletionRequest(SamplingRequest, ChatFields):
    """`POST /v1/chat/completions`."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **_OF_VLLM,
        "functions": Unsupported(_TOOLS, ([],)),
        "function_call": Unsupported(_TOOLS, ("none", "auto")),
        "web_search_options": Unsupported(_NO_SEARCH),
        "modalities": Unsupported(_TEXT_ALONE, (["text"],)),
        "audio": Unsupported(_TEXT_ALONE),
        "prediction": Unsupported("nothing is predicted ahead; leave it out"),
        "moderation": Unsupported("nothing is moderated; leave it out"),
        "reasoning_effort": Unsupported("the chat template is given no effort; leave it out"),
        "verbosity": Unsupported(
            "the chat template is given no verbosity; leave it out", ("medium",)
        ),
        "service_tier": Unsupported("there are no tiers; leave it out", ("auto", "default")),
        "prompt_cache_options": Unsupported("the prefix cache has no options; leave it out"),
        "store": Unsupported("no conversation is stored; leave it out", (False,)),
    }

    messages: list[Message] = Field(min_length=1)
    chat_template: str | None = Field(
        default=None,
        min_length=1,
        max_length=MAX_TEMPLATE,
        description="Text of a Jinja template in place of the model's, where the server's setting "
        "`trust_request_chat_template` allows it.",
    )
    documents: list[dict[str, str]] | None = Field(
        default=None, min_length=1, description="Documents that the template reads."
    )
    echo: bool = Field(
        default=False, description="Begin the reply with the assistant's last turn, if it is last."
    )
    add_special_tokens: bool = Field(
        default=False, description="Put a BOS before what the template gives."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedChoice = Field(
        default="auto",
        description="`required`, or a function by name: forces the reply into calls. `auto`: finds "
        "calls in the reply, in the form of Qwen's and Hermes' models.",
    )
    parallel_tool_calls: bool = Field(
        default=True, description="false: `required` forces exactly one call."
    )
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=1000)

    @model_validator(mode="after")
    def _form_is_one(self) -> "ChatCompletionRequest":
        choice, wanted = self.tool_choice, self.response_format
        names = {tool.function.name for tool in self.tools or ()}
        forced = choice == "required" or isinstance(choice, NamedChoice)
        if forced and not names:
            raise name_refusal({"tool_choice": "there are no tools to call; send tools"})
        if isinstance(choice, NamedChoice) and choice.function.name not in names:
            reason = f"no tool is called {choice.function.name!r:.80}; name one of tools"
            raise name_refusal({"tool_choice": reason})
        shapes = wanted is not None and wanted.forces
        if shapes and forced:
            raise name_refusal({"response_format": "tool_choice forces another form; send one"})
        if self.ignore_eos and (shapes or forced):
            raise name_refusal({"ignore_eos": "a reply of a given form ends where that does"})
        if self.top_logprobs and not self.logprobs:
            raise name_refusal({"top_logprobs": "goes with logprobs: true; send both"})
        return self


class CompletionLogprobs(Reply):
    """Columns of a completion's tokens; the first token of an echoed prompt has none."""

    tokens: list[str]
    token_logprobs: list[Float]
    top_logprobs: list[dict[str, Float] | None] | None
    text_offset: list[int]


class CompletionChoice(Reply):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    probes: list[ProbeReadings] | None = None
    activations: TokenActivations | None = None


class OpenAIUsage(Reply):
    """Tokens that a request cost."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionAnswer(CapturingAnswer):
    """The answer of `/v1/completions`, or one piece of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: OpenAIUsage | None = None


class ChatChoice(Reply):
    """One reply: `message` in an answer, `delta` in a stream."""

    index: int
    message: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    logprobs: dict[str, Any] | None = None
    finish_reason: ChatFinishReason | None
    token_ids: list[int] | None = None
    probes: list[ProbeReadings] | None = None
    activations: TokenActivations | None = None


class ChatCompletionAnswer(CapturingAnswer):
    """The answer of `/v1/chat/completions`, or one piece of its stream."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: OpenAIUsage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class ScoreRequest(CompatibleRequest):
    """`POST /v1/score` in SGLang's shape: how probable each label is after a query and an item.

    Query and items are both text, read as one text each, or both token ids, read as they are.
    """

    refused: ClassVar[dict[str, str]] = CompatibleRequest.refused | {
        "probes": "an answer has labels' probabilities alone; /logprob gives readings",
        "capture": "an answer has labels' probabilities alone; /logprob gives activations",
    }
    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "temperature": Unsupported("labels are weighed as they are; leave it out", (1,)),
        "return_token_logprobs": Unsupported("/logprob gives log-probabilities", (False,)),
        "return_pooled_hidden_states": Unsupported("no model here is a classifier", (False,)),
        "score_extraction_token_id": Unsupported("no model here is a classifier; leave it out"),
        **dict.fromkeys(
            ("embed_override_token_id", "query_embed_overrides", "item_embed_overrides"),
            Unsupported("embeddings are not replaced; leave it out"),
        ),
        "rid": Unsupported("an answer has an id of the server's own; leave it out"),
        "priority": Unsupported("send the header X-Priority"),
        **dict.fromkeys(
            ("text_1", "text_2", "data_1", "data_2", "queries", "documents"),
            Unsupported("this is SGLang's shape, not vLLM's: send query, items, label_token_ids"),
        ),
    }

    query: str | list[TokenId] = Field(default="", description="What all items are read with.")
    items: str | list[str] | list[list[TokenId]]
    label_token_ids: list[TokenId] = Field(min_length=1, description="Each once.")
    apply_softmax: bool = Field(
        default=False,
        description="Whether the labels' probabilities come to 1; else each is that of the token "
        "in the whole vocabulary.",
    )
    item_first: bool = Field(default=False, description="Read each item before the query.")

    @model_validator(mode="after")
    def _query_and_items_are_of_one_kind(self) -> "ScoreRequest":
        if len(set(self.label_token_ids)) < len(self.label_token_ids):
            raise name_refusal({"label_token_ids": "it has an id twice; name each id once"})
        as_ids = isinstance(self.items, list) and any(isinstance(i, list) for i in self.items)
        if self.items and self.query and as_ids != isinstance(self.query, list):
            reason = "text goes with a query as text, token ids with a query of token ids"
            raise name_refusal({"items": reason})
        return self


class CachedTokens(Reply):
    """How many of a request's tokens the prefix cache had."""

    cached_tokens: int


class ScoreUsage(OpenAIUsage):
    """Tokens that a request cost, and how many of them were shared."""

    prompt_tokens_details: CachedTokens


class ScoreAnswer(AppliedInterventions):
    """The answer of `/v1/score`: for each item a number for each label, in the request's order."""

    id: str
    object: Literal["scoring"] = "scoring"
    created: int
    model: str
    scores: list[list[Float]]
    flags: list[str] | None = None
    usage: ScoreUsage


class TokenizerInfo(Reply):
    """What a client needs to render chats and find special tokens."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None = Field(
        default=None, description="Null: the model has no default template."
    )
    chat_template_name: str | None = Field(
        default=None,
        description="Its name among several: `default`. Where a request has `tools`, `tool_use` is "
        "in use if there is one.",
    )
    model_max_length: int
