"""`LogsteerLM`: lm-evaluation-harness on a logsteer server, as its model "logsteer".

Importing this module registers the model, and `logsteer-eval` is the harness's own command with
it registered. The server's tokenizer cuts all text, so no checkpoint is needed where the harness
runs. Tokens and truncation are those of the harness's `hf` model; so are the numbers.
"""

import json
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

import lm_eval.models  # noqa: F401
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, warning_once
from pydantic import BaseModel
from tqdm import tqdm

from logsteer._calls import ApiCall, checked
from logsteer._endpoints import ENDPOINTS
from logsteer.client import Client
from logsteer.errors import AnswerError, InvalidRequestError, LogsteerError
from logsteer.extras.datasets import load_steering
from logsteer.schemas import AdapterCard, BosPolicy, ModelCard, Steering, SteeringLike, UsedAdapter
from logsteer.schemas.openai import CompletionAnswer, TokenizerInfo
from logsteer.schemas.steering import RECOMMENDED

Ids: TypeAlias = list[int]
T = TypeVar("T")
S = TypeVar("S")
A = TypeVar("A", bound=BaseModel)
Group: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], list[int]]
"""A context, a target, and the places of the pairs that are these two."""

TOKENS_PER_REQUEST = 131_072
IN_FLIGHT = 4
DEFAULT_BATCH_SIZE = 1024


# The full schemas of the answers would cost more than the rest of the client's work; fields that
# are not named here are skipped.
class Score(BaseModel):
    """What is read of one target's score; `logprob` is None where it is not finite."""

    logprob: float | None
    is_greedy: bool


class Item(BaseModel):
    """One item of `/logprob`."""

    targets: list[Score]


class Scores(BaseModel):
    """The answer of `/logprob`."""

    results: list[Item]
    adapter: UsedAdapter | None = None


class Tokens(BaseModel):
    """One text of `/tokenize`."""

    token_ids: Ids


class Tokenized(BaseModel):
    """The answer of `/tokenize`."""

    results: list[Tokens]


def group_pairs(pairs: Iterable[tuple[Ids, Ids]]) -> list[Group]:
    """Return each distinct pair of context and target once, those of a context together."""
    groups: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
    for place, (context, target) in enumerate(pairs):
        groups.setdefault(tuple(context), {}).setdefault(tuple(target), []).append(place)
    return [
        (context, target, places)
        for context, targets in groups.items()
        for target, places in targets.items()
    ]


def cut_slices(values: Iterable[T], count: int, weigh: Callable[[T], int]) -> list[list[T]]:
    """Cut values into lists of at most `count`, each of one value or within a request's tokens."""
    slices: list[list[T]] = []
    weight = 0
    for value in values:
        more = weigh(value)
        if not slices or len(slices[-1]) >= count or weight + more > TOKENS_PER_REQUEST:
            slices.append([])
            weight = 0
        slices[-1].append(value)
        weight += more
    return slices


def run_concurrently(work: Callable[[T], S], batches: Sequence[T]) -> Iterator[tuple[T, S]]:
    """Yield each batch with what `work` makes of it, in order; a few run at any time."""
    # Threads, as the caller may be a notebook, whose event loop runs already.
    pool = ThreadPoolExecutor(IN_FLIGHT)
    try:
        yield from zip(batches, pool.map(work, batches), strict=True)
    finally:
        pool.shutdown(cancel_futures=True)


def render_chat(
    info: TokenizerInfo, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool
) -> str:
    """Write a conversation as text, up to the assistant's next turn or the end of its last one.

    Needs jinja2. Raises LogsteerError without a chat template, or where it refuses.
    """
    # The template comes from the server: it must not reach the caller's Python.
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if info.chat_template is None:
        raise LogsteerError("this model has no chat template: leave --apply_chat_template out")

    def refuse(message: Any) -> NoReturn:
        raise TemplateError(str(message))

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals |= {"raise_exception": refuse, "strftime_now": datetime.now().strftime}
    tokens = {"bos_token": info.bos_token or "", "eos_token": info.eos_token or ""}
    try:
        text: str = environment.from_string(info.chat_template).render(
            messages=list(messages), add_generation_prompt=add_generation_prompt, **tokens
        )
    except TemplateError as error:
        raise LogsteerError(f"the chat template refuses these messages: {error}") from error
    return text if add_generation_prompt else _cut_after(text, messages[-1]["content"])


def _cut_after(text: str, turn: str) -> str:
    """Return the text up to the end of its last turn, which is to be continued."""
    start = text.rfind(turn.strip())
    if start < 0:
        raise LogsteerError("the chat template changes the last message: it cannot be continued")
    # Some templates strip a turn's white space.
    own = turn.lstrip() if text.startswith(turn.lstrip(), start) else turn.strip()
    return text[: start + len(own)]


def find_card(client: Client, model: str | None) -> ModelCard:
    """Return the card of a model; of the only one where none is named. Errors: LogsteerError."""
    if model is not None:
        return client.model(model)
    cards = client.models().models
    if len(cards) != 1:
        names = ", ".join(card.id for card in cards) or "none"
        raise LogsteerError(f"give model: {client.base_url} has {names}")
    return cards[0]


def read_batch_size(given: int | str) -> int:
    """Return the sequences in one request; the default for "auto" and 1. Errors: ValueError."""
    if str(given) == "1" or str(given).startswith("auto"):
        return DEFAULT_BATCH_SIZE
    if not str(given).isdecimal() or int(given) == 0:
        raise ValueError(f"batch_size is {given!r}; give a number of sequences, or auto")
    return int(given)


def read_max_length(given: int | None, card: ModelCard) -> int:
    """Return how many tokens are read at once.

    Errors: LogsteerError before the model answers; ValueError.
    """
    limit = card.context_length
    if limit is None:
        raise LogsteerError(
            f"model {card.id} is {card.state}: {card.detail}; wait until it answers"
        )
    if given is not None and not 2 <= given <= limit:
        raise ValueError(f"max_length is {given}; model {card.id} reads 2 to {limit} tokens")
    return given or limit


def read_steering(client: Client, given: SteeringLike | Path) -> dict[str, Any]:
    """Return a steering object as JSON has it, its vectors by content, as they are recommended.

    So a run has one steering, whatever becomes of the vectors' names meanwhile. A string is JSON,
    a file of that, or vectors as in "mood:4@3".

    Errors: LogsteerError for an invalid steering object, and for an unknown vector.
    """
    is_file = isinstance(given, Path) or (isinstance(given, str) and Path(given).exists())
    if is_file or str(given).lstrip().startswith("{") or str(given).endswith(".json"):
        given = load_steering(given)  # type: ignore[arg-type]
    steering = checked(Steering, given).model_copy(deep=True)
    for vector in steering.vectors:
        if vector.name is not None:
            card = client.vectors.get(vector.name)
            advice = card.about.recommendation
            vector.sha256, vector.name = card.sha256, None
            vector.scale = vector.choose_scale(advice.scale if advice else None)
            if vector.layers == RECOMMENDED:
                vector.layers = None if advice is None else [advice.layer]
    return steering.model_dump(mode="json", exclude_none=True)


def check_adapter(asked: AdapterCard | None, used: UsedAdapter | None) -> None:
    """Check that an answer is under the adapter asked for. Errors: LogsteerError."""
    # Requests name an adapter, and a name may be given another content while a run lasts.
    if asked is not None and (used is None or used.sha256 != asked.sha256):
        found = "none" if used is None else f"one of content {used.sha256[:12]}"
        raise LogsteerError(
            f"adapter {asked.name} was {asked.sha256[:12]} when the run began, and an answer was "
            f"computed under {found}: keep the name as it is, and begin again"
        )


# The registry loads the harness's own models only while it is empty: they go first.


_log = logging.getLogger(__name__)

MAX_GEN_TOKS = 256
"""As the harness's `hf` model has it."""
_BOS_POLICIES: dict[bool | None, BosPolicy] = {None: "auto", True: "always", False: "never"}
_CHARS_PER_TOKEN = 2
"""A low guess: it only keeps requests small."""

Scored: TypeAlias = tuple[float, bool]
Pair: TypeAlias = tuple[str, str]
Encoded: TypeAlias = tuple[Pair | None, Ids, Ids]
"""A request (None: a part of one), and the tokens of its context and its continuation."""


@register_model("logsteer")
class LogsteerLM(TemplateLM):  # type: ignore[misc]  # the harness is not typed
    """A model on a logsteer server, for lm-evaluation-harness.

    `base_url`, `api_key` and `timeout` are those of `logsteer.Client`; `model` may be left out
    where the server has only one. `max_length` (tokens that are read at once) is the model's own
    unless given. `add_bos_token` says whether text is encoded with BOS in front; None: as the
    tokenizer does. `batch_size` is the number of sequences in one HTTP request; "auto" and 1, which
    the harness passes by default, leave it to the adapter. `prefix_token_id` stands
    before text without context: BOS unless given, else EOS. `steering` is a steering object, its
    JSON, or a file of that; every request is steered by it, a target's context being its prompt.
    Vectors that it names are those of the time when this object was made. `adapter` names a
    stored LoRA adapter, which is added to the model's parameters; a run ends if the name is given
    another content. The harness' `--use_cache` tells answers apart by request alone: give each
    steering and each adapter a cache of its own.
    """

    def __init__(
        self,
        base_url: str | None = None,
        model: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float | None = None,
        batch_size: int | str = "auto",
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        max_gen_toks: int = MAX_GEN_TOKS,
        prefix_token_id: int | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        steering: SteeringLike | Path | None = None,
        adapter: str | None = None,
    ) -> None:
        super().__init__()
        if max_batch_size is not None or device is not None:
            _log.warning("max_batch_size and device have no effect: the server decides both")
        self._client = Client(base_url, api_key=api_key, timeout=timeout)
        weakref.finalize(self, self._client.close)  # the harness closes no model
        self._card = find_card(self._client, model)
        self.batch_size = read_batch_size(batch_size)
        """Sequences in one HTTP request."""
        self.max_length = read_max_length(max_length, self._card)
        """Tokens that the model reads at once."""
        self.max_gen_toks = max_gen_toks
        """Tokens generated where a task does not say how many."""
        self._changes: dict[str, Any] = {}
        if steering is not None:
            self._changes["steering"] = read_steering(self._client, steering)
        self._adapter: AdapterCard | None = None
        if adapter is not None:
            # As it is now: a name may be given another content.
            self._adapter = self._client.adapters.get(adapter)
            self._changes["adapter"] = adapter
        self._bos = _BOS_POLICIES[add_bos_token]
        self._prefix_token_id = prefix_token_id

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's digest: the harness tells its caches of requests apart by it."""
        provenance = self._card.provenance
        return provenance.tokenizer_digest if provenance else self._card.id

    def get_model_info(self) -> dict[str, Any]:
        """Return what computed the numbers, for the harness's record of the run."""
        provenance = self._card.provenance
        changes = dict(self._changes)
        if self._adapter is not None:
            changes["adapter"] = self._adapter.model_dump(include={"name", "sha256"})
        return {"model_provenance": provenance.model_dump() if provenance else None, **changes}

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the model's chat template, for the harness's record of the run.

        Raises LogsteerError for the name of a template that is not in use.
        """
        info = self._tokenizer_info
        if isinstance(chat_template, str) and chat_template != info.chat_template_name:
            raise LogsteerError(
                f"the server uses the chat template {info.chat_template_name}, not "
                f"{chat_template!r}: leave its name out of --apply_chat_template"
            )
        return info.chat_template if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Write a conversation as text; LogsteerError where the model has no chat template."""
        return render_chat(self._tokenizer_info, chat_history, add_generation_prompt)

    @property
    def eot_token_id(self) -> int:
        """The end-of-sequence token; LogsteerError where the tokenizer has none."""
        eos = self._tokenizer_info.eos_token
        if eos is None:
            raise LogsteerError("the tokenizer has no EOS token: give prefix_token_id")
        return self.tok_encode(eos, add_special_tokens=False)[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before text without context: BOS, else EOS."""
        if self._prefix_token_id is None:
            try:
                self._prefix_token_id = self._tokenize(["a"], "always")["a"][0]
            except InvalidRequestError:  # the tokenizer has no BOS
                self._prefix_token_id = self.eot_token_id
        return self._prefix_token_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Cut a text into tokens; BOS in front as `add_bos_token` says, unless told otherwise."""
        policy = self._bos if add_special_tokens is None else _BOS_POLICIES[add_special_tokens]
        return self._tokenize([string], policy)[string]

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Scored]:
        """Score each continuation: its log-probability, and whether it is the greedy one."""
        pairs: list[Pair] = [request.args for request in requests]
        batches = cut_slices(
            range(len(pairs)),
            self.batch_size,
            lambda place: sum(map(len, pairs[place])) // _CHARS_PER_TOKEN,
        )

        # Encoded where they are scored: so the server cuts texts while its engine is at work.
        def score(batch: list[int]) -> list[Scored]:
            return self._score(self._encode_pairs([pairs[place] for place in batch]))

        return self._run("loglikelihood", score, batches, pairs, disable_tqdm)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Score each whole text after the prefix token, read in disjoint windows.

        A text that begins with the prefix token has no second one, whatever `add_bos_token` says.
        """
        texts = [request.args[0] for request in requests]
        tokens = self._tokenize(texts, "never")
        windows: list[Encoded] = []
        owners: list[int] = []
        for owner, text in enumerate(texts):
            own = tokens[text]
            has_prefix = own[:1] == [self.prefix_token_id]
            for pair in get_rolling_token_windows(
                own[has_prefix:], self.prefix_token_id, self.max_length, context_len=1
            ):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(owner)
        totals = [0.0] * len(texts)
        scores = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for owner, (logprob, _) in zip(owners, scores, strict=True):
            totals[owner] += logprob
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each context, up to a stop string or the number of tokens."""
        settings = [normalize_gen_kwargs(r.args[1], self.max_gen_toks) for r in requests]
        tokens = self._tokenize([request.args[0] for request in requests], self._bos)
        groups: dict[str, list[int]] = {}
        for place, setting in enumerate(settings):
            groups.setdefault(json.dumps(setting, sort_keys=True), []).append(place)
        batches = [
            batch
            for places in groups.values()
            for batch in cut_slices(places, self.batch_size, lambda _: self.max_length)
        ]

        def generate(batch: list[int]) -> list[str]:
            prompts = [tokens[requests[place].args[0]] for place in batch]
            return self._generate(prompts, settings[batch[0]])

        asked = [request.args for request in requests]
        return self._run("generate_until", generate, batches, asked, disable_tqdm)

    def _generate(self, prompts: list[Ids], setting: Mapping[str, Any]) -> list[str]:
        room = self.max_length - setting["max_gen_toks"]
        if room <= 0:
            raise ValueError(
                f"max_gen_toks is {setting['max_gen_toks']}, and the model reads {self.max_length} "
                "tokens at once: no room is left for a prompt; lower max_gen_toks"
            )
        if any(len(ids) > room for ids in prompts):
            warning_once(_log, f"prompts are cut at the left to {room} tokens")
        own = {"until", "do_sample", "max_gen_toks"}
        body = {name: value for name, value in setting.items() if name not in own}
        if not setting["do_sample"]:
            body["temperature"] = 0.0
        stop = [text for text in setting["until"] if text]
        if stop:
            body["stop"] = stop
        body |= {"prompt": [ids[-room:] for ids in prompts], "max_tokens": setting["max_gen_toks"]}
        answer = self._post("v1.completions", body, CompletionAnswer)
        check_adapter(self._adapter, answer.adapter)
        texts = {choice.index: choice.text for choice in answer.choices}
        if texts.keys() != set(range(len(prompts))):
            raise AnswerError(f"asked for {len(prompts)} completions, got numbers {sorted(texts)}")
        # As the harness does for every model: nothing of a stop string stays, whatever the server.
        return [postprocess_generated_text(texts[i], stop, None) for i in range(len(prompts))]

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], disable_tqdm: bool = False, **_: Any
    ) -> list[Scored]:
        batches = cut_slices(
            range(len(requests)),
            self.batch_size,
            lambda place: len(requests[place][1]) + len(requests[place][2]),
        )
        return self._run(
            "loglikelihood",
            lambda batch: self._score([requests[place] for place in batch]),
            batches,
            [request[0] for request in requests],
            disable_tqdm,
        )

    def _run(
        self,
        kind: str,
        work: Callable[[list[int]], list[S]],
        batches: list[list[int]],
        asked: Sequence[Any],
        disable_tqdm: bool,
    ) -> list[S]:
        """Return what `work` makes of each place; `asked` are the arguments there, for caches.

        None: a part of a request, which no cache keeps.
        """
        found: dict[int, S] = {}
        with tqdm(total=len(asked), disable=disable_tqdm, desc=f"Running {kind} requests") as bar:
            for batch, results in run_concurrently(work, batches):
                for place, result in zip(batch, results, strict=True):
                    found[place] = result
                    if asked[place] is not None:
                        self.cache_hook.add_partial(kind, asked[place], result)
                bar.update(len(batch))
        return [found[place] for place in range(len(asked))]

    def _encode_pairs(self, pairs: Sequence[Pair]) -> list[Encoded]:
        """Encode as `TemplateLM.loglikelihood` and `_encode_pair` do, many pairs at once."""
        moved = [
            (bare := context.rstrip(), context[len(bare) :] + target) for context, target in pairs
        ]
        alone = self._tokenize((target for context, target in pairs if not context), "never")
        joint = self._tokenize(
            (
                text
                for (given, _), (context, target) in zip(pairs, moved, strict=True)
                if given
                for text in (context, context + target)
            ),
            self._bos,
        )
        encoded: list[Encoded] = []
        for pair, (context, target) in zip(pairs, moved, strict=True):
            if pair[0]:
                ids = joint[context]
                encoded.append((pair, ids, joint[context + target][len(ids) :]))
            elif (ids := alone[target])[:1] == [self.prefix_token_id]:
                encoded.append((pair, ids[:1], ids[1:]))
            else:
                encoded.append((pair, [self.prefix_token_id], ids))
        return encoded

    def _tokenize(self, texts: Iterable[str], bos: BosPolicy) -> dict[str, Ids]:
        """Return each distinct text's tokens."""

        def tokenize(batch: list[str]) -> list[Tokens]:
            return self._post("tokenize", {"texts": batch, "bos": bos}, Tokenized).results

        batches = cut_slices(
            dict.fromkeys(texts), 2 * self.batch_size, lambda text: len(text) // _CHARS_PER_TOKEN
        )
        return {
            text: tokens.token_ids
            for batch, results in run_concurrently(tokenize, batches)
            for text, tokens in zip(batch, results, strict=True)
        }

    def _score(self, requests: Sequence[Encoded]) -> list[Scored]:
        scores: list[Scored] = [(math.nan, False)] * len(requests)
        groups = group_pairs(self._fit(request) for request in requests)
        for batch in cut_slices(groups, len(groups), lambda one: len(one[0]) + len(one[1])):
            # Of a context one item, so that the server reads it once.
            items = [
                {"context_ids": context, "target_ids": [target for _, target, _ in same]}
                for context, same in groupby(batch, itemgetter(0))
            ]
            fields = {"items": items, "columns": ["logprob", "rank"], "per_token": False}
            answer = self._post("logprob", fields, Scores)
            check_adapter(self._adapter, answer.adapter)
            targets = [target for item in answer.results for target in item.targets]
            for (_, _, places), target in zip(batch, targets, strict=True):
                if target.logprob is None:
                    asked = requests[places[0]][0]
                    raise LogsteerError(f"a log-probability is not finite: that of {asked!r:.200}")
                for place in places:
                    scores[place] = (target.logprob, target.is_greedy)
        return scores

    def _fit(self, request: Encoded) -> tuple[Ids, Ids]:
        """Return the context, cut at the left to what the model reads, and the continuation."""
        text, context, target = request
        if not target:
            raise ValueError(
                "a continuation has no token of its own beside its context: part them by a "
                f"target_delimiter that begins a new token: {text!r:.200}"
            )
        excess = len(context) + len(target) - (self.max_length + 1)
        if excess > 0:
            if excess >= len(context):
                raise ValueError(
                    f"a continuation has {len(target)} tokens, and the model reads "
                    f"{self.max_length} at once: {text!r:.200}"
                )
            warning_once(_log, f"contexts are cut at the left to max_length {self.max_length}")
            return context[excess:], target
        return context, target

    @cached_property
    def _tokenizer_info(self) -> TokenizerInfo:
        found: TokenizerInfo = self._client._ask("tokenizer_info", model=self._card.id)
        return found

    def _post(self, name: str, fields: Mapping[str, Any], schema: type[A]) -> A:
        endpoint = ENDPOINTS[name]
        changes = {} if name == "tokenize" else self._changes
        fields = {"model": self._card.id, **fields, **changes}
        body = json.dumps(fields, separators=(",", ":")).encode()
        answer: A = self._client._answer(ApiCall(endpoint.method, endpoint.path, schema, body))
        return answer


def main() -> None:
    """Run lm-evaluation-harness's own command, which knows `--model logsteer` by now."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
