"""OpenAI-shaped requests as jobs, and the jobs' outputs as choices.

A prompt that is echoed with log-probabilities is scored like any other sequence. The one greedy
token that lm-evaluation-harness requests in addition is read from the prompt's last row, so that
nothing is generated.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import orjson

from logsteer.errors import api_error
from logsteer.schemas.common import BosPolicy
from logsteer.schemas.openai import ChatCompletionRequest, CompletionRequest, SamplingRequest
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import (
    NEUTRAL,
    TOP_IDS,
    TOP_LOGPROBS,
    GenerateJob,
    GenerateOutput,
    Ids,
    Job,
    Policy,
    ReplyForm,
    ScoreJob,
    ScoreOutput,
    draw_seed,
)
from logsteer_server.tasks.planning import Cover, ItemProblems
from logsteer_server.tasks.policies import plan_policy
from logsteer_server.tasks.reply_form import plan_form
from logsteer_server.tasks.tool_calls import CALL_BEGINS
from logsteer_server.text.chat import ChatForm
from logsteer_server.text.prompts import check_prompt, fit_prompt, is_one_prompt, read_prompts
from logsteer_server.text.tokenizer import CharCounter, TextCodec, check_ids


@dataclass(frozen=True, slots=True)
class CompletionPrompt:
    """One prompt: its text, its tokens, and the job that scores it, if that is requested.

    `reads_next`: the last row of that job gives the one greedy token requested. `starts`: where in
    the text each token of an echoed prompt begins, in characters. `shared`: the first so many rows
    of the score are the previous prompt's, and not scored again.
    """

    text: str
    ids: list[int]
    echo_job: ScoreJob | None
    reads_next: bool
    samples: list[GenerateJob]
    starts: list[int] = field(default_factory=list)
    shared: int = 0

    @property
    def jobs(self) -> list[Job]:
        """The jobs: scoring first, then generation."""
        return [*([self.echo_job] if self.echo_job else []), *self.samples]


def plan_completions(
    request: CompletionRequest, codec: TextCodec, info: EngineInfo, cover: Cover
) -> list[CompletionPrompt]:
    """Plan the prompts of a request. Errors: APIError `invalid_request`, `context_too_long`.

    Text is encoded with a BOS where the tokenizer adds one; ids are taken as they are.
    """
    prompts: list[CompletionPrompt] = []
    num_planned = 0
    top = _count_listed(request, request.logprobs, info)
    policy = plan_policy(request, codec, info, ignore_eos=request.ignore_eos)
    is_one = is_one_prompt(request.prompt)
    problems = ItemProblems("prompt", is_one=is_one)
    bos: BosPolicy = "auto" if request.add_special_tokens else "never"
    form = plan_form(request, request.n * (1 if is_one else len(request.prompt)), info)
    for index, (text, given) in enumerate(read_prompts(request.prompt, codec, bos)):
        ids = truncate(given, request, request.max_tokens, info)
        text = text if len(ids) == len(given) else None
        scores_echo = request.echo and top is not None
        reads_next = scores_echo and _is_one_greedy_token(request, policy)
        generates = request.max_tokens > 0 and not reads_next
        with problems.catch(index):
            check_prompt(text, ids, info.vocab_size)
            fit_prompt(ids, request.max_tokens if generates else 0, info.context_length)
        echo_job = _plan_echo(ids, request, info, top if scores_echo else None, reads_next)
        is_given = text is not None
        if text is None:  # not before it is known to be short: millions of ids take gigabytes
            text = codec.decode(ids)
        starts = _find_starts(text if is_given else None, ids, codec) if scores_echo else []
        samples = []
        if generates:
            samples = _plan_samples(request, ids, request.max_tokens, top, policy, form)
        prompts.append(CompletionPrompt(text, ids, echo_job, reads_next, samples, starts))
        num_planned += sum(job.num_expected for job in prompts[-1].jobs)
        cover(num_planned)
    return prompts


def _is_one_greedy_token(request: CompletionRequest, policy: Policy) -> bool:
    """Return whether the request is for one greedy token."""
    asks_more = request.probes or request.response_format or request.stop_token_ids
    is_one = request.max_tokens == request.n == 1 and request.skip_special_tokens
    return is_one and policy.temperature == 0 and not policy.adjustments and not asks_more


def _find_starts(text: str | None, ids: list[int], codec: TextCodec) -> list[int]:
    """Return where each token begins in the prompt's text; tokens put before it begin at 0."""
    if text is None:
        return codec.find_starts(ids)
    starts = [start for start, _ in codec.encode([text])[0].offsets]
    return [0] * (len(ids) - len(starts)) + starts


def plan_chat(
    request: ChatCompletionRequest, codec: TextCodec, info: EngineInfo
) -> CompletionPrompt:
    """Plan a conversation. Errors: APIError `invalid_request`, `context_too_long`."""
    text = codec.render_chat(request.messages, ChatForm.of(request))
    ids = codec.encode_ids([text])[0]
    if request.add_special_tokens:
        ids = codec.bos_ids("auto", ids) + ids
    asked = request.max_completion_tokens or request.max_tokens
    ids = truncate(ids, request, asked or 1, info)
    max_tokens = asked or max(1, info.context_length - len(ids))
    with ItemProblems("messages", is_one=True).catch(0):
        fit_prompt(ids, max_tokens, info.context_length)
    top = _count_listed(request, request.top_logprobs if request.logprobs else None, info)
    form = plan_form(request, request.n, info)
    if form is None and request.tools and request.tool_choice == "auto":
        _check_calls_are_read(request.chat_template or codec.find_template(has_tools=True)[1])
    policy = plan_policy(request, codec, info, ignore_eos=request.ignore_eos)
    samples = _plan_samples(request, ids, max_tokens, top, policy, form)
    echo_job = _plan_echo(ids, request, info, None, reads_next=False)
    return CompletionPrompt(text, ids, echo_job, False, samples)


def _count_listed(request: SamplingRequest, asked: int | None, info: EngineInfo) -> int | None:
    """Return how many tokens are listed beside each drawn one; None without log-probabilities."""
    listed = request.logprob_token_ids or ()
    check_ids(listed, info.vocab_size, "logprob_token_ids")
    return len(listed) or (None if asked is None else min(asked, info.vocab_size))


def truncate(
    ids: list[int], request: SamplingRequest, max_tokens: int, info: EngineInfo
) -> list[int]:
    """Return the last tokens of a prompt, as many as the request asks for."""
    asked = request.truncate_prompt_tokens
    if asked is None:
        return ids
    return ids[-asked:] if asked > 0 else ids[-max(1, info.context_length - max_tokens) :]


def _check_calls_are_read(template: str) -> None:
    if CALL_BEGINS not in template:
        detail = (
            f"tool_choice: auto looks for calls in the form {CALL_BEGINS}, which this model's chat "
            "template does not use: send required, a function's name, or none."
        )
        raise api_error("invalid_request", detail, param="tool_choice")


def count_alternatives(request: SamplingRequest, info: EngineInfo) -> int | None:
    """Return the number of alternatives per token of a prompt; None: not requested."""
    return info.vocab_size if request.prompt_logprobs == -1 else request.prompt_logprobs


def _plan_echo(
    ids: list[int],
    request: SamplingRequest,
    info: EngineInfo,
    echoed: int | None,
    reads_next: bool,
) -> ScoreJob | None:
    """Return the job that scores a prompt from its second token on, and reads the next row.

    It lists as many alternatives as the echo and `prompt_logprobs` show, at least; the latter are
    read at the request's temperature.
    """
    shown, policy = count_alternatives(request, info), NEUTRAL
    columns = ("logprob",) if shown is None else ("logprob", "rank")
    if shown is None and echoed is None:
        return None
    if shown is not None and request.logprobs_mode == "processed_logprobs":
        policy = Policy(temperature=request.temperature or 1.0)
    if policy != NEUTRAL:
        columns = (*columns, "log_q")
    if echoed and policy != NEUTRAL:
        detail = (
            "An echo lists alternatives at temperature 1, prompt_logprobs at the request's own: "
            "leave out one of them, or send logprobs_mode: raw_logprobs."
        )
        raise api_error("invalid_request", detail, param="prompt_logprobs")
    top = min(info.vocab_size, max(echoed or 0, shown or 0))
    if reads_next:
        # No target follows the last row; the alternatives that are read there say what would.
        targets = np.array([*ids[1:], 0], dtype=np.int32)
        return ScoreJob(
            np.array(ids, dtype=np.int32), targets, columns, top=max(1, top), policy=policy
        )
    if len(ids) < 2:
        return None
    tokens, targets = np.array(ids[:-1], dtype=np.int32), np.array(ids[1:], dtype=np.int32)
    return ScoreJob(tokens, targets, columns, top=top, policy=policy)


def _plan_samples(
    request: SamplingRequest,
    ids: list[int],
    max_tokens: int,
    top: int | None,
    policy: Policy,
    form: ReplyForm | None,
) -> list[GenerateJob]:
    """Return the jobs of one prompt's samples; without log-probabilities where `top` is None."""
    seed = draw_seed() if request.seed is None else request.seed
    tokens = np.array(ids, dtype=np.int32)
    return [
        GenerateJob(
            tokens,
            max_tokens,
            policy,
            seed=seed + index,
            stop=request.stop_strings,
            stop_ids=tuple(request.stop_token_ids),
            include_stop=request.include_stop_str_in_output,
            skip_special=request.skip_special_tokens,
            ignore_eos=request.ignore_eos,
            top=top or 0,
            listed=tuple(request.logprob_token_ids or ()),
            logprobs=top is not None,
            stream=request.stream,
            form=form,
        )
        for index in range(request.n)
    ]


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """Columns of N tokens, which may begin with a prompt's; alternatives are [N, top].

    `starts` are where those of a prompt begin in its text, of `num_chars` characters.
    """

    token_ids: list[int]
    logprobs: list[float | None]
    top_ids: list[list[int] | None]
    top_logprobs: list[list[float] | None]
    starts: list[int] = field(default_factory=list)
    num_chars: int = 0

    def render(self, codec: TextCodec, counter: CharCounter, as_ids: bool) -> dict[str, Any]:
        """Return the columns as `CompletionLogprobs`; `counter` counts the characters of a choice.

        The alternatives name the token itself, too, as OpenAI's do; tokens that have one text have
        names of their own, the most probable that text.
        """
        counter.num_chars += self.num_chars
        drawn = self.token_ids[len(self.starts) :]
        offsets = self.starts + [counter.add(codec.shown_bytes(token_id)) for token_id in drawn]
        tokens: list[str] = []
        top: list[dict[str, float | None] | None] = []
        for token_id, logprob, ids, values in zip(
            self.token_ids, self.logprobs, self.top_ids, self.top_logprobs, strict=True
        ):
            entries: dict[int, float | None] = dict(zip(ids or (), values or (), strict=True))
            entries.setdefault(token_id, logprob)  # behind those that are more probable
            names: dict[int, str] = {}
            own: dict[str, float | None] = {}
            for number, value in entries.items():
                names[number] = name_token(codec, number, as_ids, own)
                own[names[number]] = value
            tokens.append(names[token_id])
            top.append(None if ids is None else own)
        return {
            "tokens": tokens,
            "token_logprobs": self.logprobs,
            "top_logprobs": top,
            "text_offset": offsets,
        }


def name_token(codec: TextCodec, token_id: int, as_id: bool, others: Container[str] = ()) -> str:
    """Return a token's text; where others have that, its bytes as OpenAI writes them, or its id."""
    by_id = f"token_id:{token_id}"
    name = by_id if as_id else codec.piece(token_id)
    if name in others:
        name = f"bytes:{repr(codec.piece_bytes(token_id))[2:-1]}"
    return by_id if name in others else name


def read_generated(output: GenerateOutput) -> TokenColumns:
    """Return the columns of sampled tokens."""
    return TokenColumns(
        output.token_ids.tolist(),
        output.logprobs.tolist(),
        list(output.top_ids.tolist()),
        list(output.top_logprobs.tolist()),
    )


def read_echo(prompt: CompletionPrompt, output: ScoreOutput | None, top: int) -> TokenColumns:
    """Return the columns of a prompt's own tokens; the first has no log-probability."""
    where = prompt.starts, len(prompt.text)
    if output is None:
        return TokenColumns(prompt.ids, [None], [None], [None], *where)
    count = len(prompt.ids) - 1
    return TokenColumns(
        prompt.ids,
        [None, *output.columns["logprob"][:count].tolist()],
        [None, *_cut(output.columns.get(TOP_IDS), count, top)],
        [None, *_cut(output.columns.get(TOP_LOGPROBS), count, top)],
        *where,
    )


def _cut(values: np.ndarray | None, count: int, top: int) -> list[list[Any]]:
    return [[] for _ in range(count)] if values is None else values[:count, :top].tolist()


def read_next(
    output: ScoreOutput, codec: TextCodec, top: int, eos_ids: Sequence[int]
) -> GenerateOutput:
    """Return the greedy token of an echoed prompt's last row, as if it had been generated.

    It ends the completion where it is one of `eos_ids`.
    """
    ids: Ids = output.columns[TOP_IDS][-1:]
    logprobs = output.columns[TOP_LOGPROBS][-1:]
    ends = int(ids[0, 0]) in eos_ids
    return GenerateOutput(
        ids[:, 0],
        "" if ends else codec.piece(int(ids[0, 0])),
        logprobs[:, 0],
        ids[:, :top],
        logprobs[:, :top],
        "stop" if ends else "length",
        cached_tokens=output.cached_tokens,
    )


ENTRY = b'"%d":{"logprob":%b,"rank":%d,"decoded_token":%b}'
"""A token of `prompt_logprobs`: its id, log-probability, rank and text."""


class JsonText:
    """A part of a document that is already JSON. Not a dataclass, which orjson would serialize."""

    def __init__(self, text: bytes) -> None:
        self.text = text


def share_rows(prompts: Sequence[CompletionPrompt]) -> list[CompletionPrompt]:
    """Return the prompts without the rows that the previous prompt has, too.

    A teacher scores several samples of one prompt: their common prefix is scored once. Of ids [5,
    6, 7, 8] after [5, 6, 7, 9] the rows of 6 and 7 are shared, and that of 8 is scored.
    """
    shared = list(prompts[:1])
    for before, prompt in pairwise(prompts):
        count = 0
        if before.echo_job and prompt.echo_job:
            length = min(len(before.ids), len(prompt.ids))
            differs = np.array(before.ids[:length]) != np.array(prompt.ids[:length])
            same = int(differs.argmax()) if differs.any() else length
            count = max(0, min(same, len(prompt.ids) - 1) - 1)
        if count and prompt.echo_job:
            job = replace(prompt.echo_job, targets=prompt.echo_job.targets[count:])
            prompt = replace(prompt, echo_job=job, shared=count)
        shared.append(prompt)
    return shared


def write_prompt_rows(
    prompt: CompletionPrompt, output: ScoreOutput, shown: int, codec: TextCodec
) -> list[bytes]:
    """Write the log-probabilities of a prompt's scored tokens in vLLM's shape.

    Each token and its `shown` alternatives, by id, log-probability, rank and text. A row's entries
    are formatted at once: a token of 64 alternatives as dictionaries would cost the HTTP process
    more than the model does.
    """
    scored, columns, piece = prompt.ids[1 + prompt.shared :], output.columns, codec.json_piece
    count = len(scored)
    ids_TK, logprobs_TK = (
        np.array(scored, np.int32)[:, None],
        columns.get("log_q", columns["logprob"])[:count, None],
    )
    if shown:
        ids_TK = np.concatenate([ids_TK, columns[TOP_IDS][:count, :shown]], axis=1)
        listed_TK = columns[TOP_LOGPROBS][:count, :shown]
        logprobs_TK = np.concatenate([logprobs_TK, listed_TK], axis=1)
    rows = []
    for ids_K, logprobs_K, rank in zip(ids_TK, logprobs_TK, columns["rank"].tolist(), strict=False):
        ids, fields = ids_K.tolist(), list[Any]()
        values = orjson.dumps(logprobs_K, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1].split(b",")
        for place, number in enumerate(ids):
            if not place or number != ids[0]:  # the token itself is there once, with its own rank
                fields += (number, values[place], place or rank, piece(number))
        rows.append(b"{%b}" % (b",".join([ENTRY] * (len(fields) // 4)) % tuple(fields)))
    return rows


def render_chat_logprobs(columns: TokenColumns, codec: TextCodec, as_ids: bool) -> dict[str, Any]:
    """Write the columns in the shape of chat completions' `logprobs`."""

    def describe(token_id: int, logprob: float | None) -> dict[str, Any]:
        name = name_token(codec, token_id, as_ids)
        return {"token": name, "logprob": logprob, "bytes": list(codec.piece_bytes(token_id))}

    content = []
    for index, token_id in enumerate(columns.token_ids):
        ids, values = columns.top_ids[index] or [], columns.top_logprobs[index] or []
        top = [describe(i, value) for i, value in zip(ids, values, strict=True)]
        content.append(describe(token_id, columns.logprobs[index]) | {"top_logprobs": top})
    return {"content": content}
