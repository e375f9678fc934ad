"""`LogsteerLM`: lm-evaluation-harness on a logsteer server, as its model "logsteer".

Importing this module registers the model, and `logsteer-eval` is the harness's own command with
it registered. The server's tokenizer cuts all text, so no checkpoint is needed where the harness
runs. Tokens and truncation are those of the harness's `hf` model; so are the numbers.
"""

import json
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

# The registry loads the harness's own models only while it is empty: they go first.
import lm_eval.models  # noqa: F401
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, warning_once
from pydantic import BaseModel
from tqdm import tqdm

from logsteer._calls import ApiCall
from logsteer._endpoints import ENDPOINTS
from logsteer.client import Client
from logsteer.errors import AnswerError, InvalidRequestError, LogsteerError
from logsteer.lm_eval.batches import (
    Ids,
    Scores,
    Tokenized,
    Tokens,
    cut_slices,
    make_batches,
    run_concurrently,
)
from logsteer.lm_eval.settings import (
    check_adapter,
    find_adapter,
    find_card,
    read_batch_size,
    read_max_length,
    read_steering,
    render_chat,
)
from logsteer.schemas import BosPolicy, SteeringLike
from logsteer.schemas.openai import CompletionAnswer, TokenizerInfo

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
T = TypeVar("T")
A = TypeVar("A", bound=BaseModel)


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
        self._batch_size = read_batch_size(batch_size)
        self._max_length = read_max_length(max_length, self._card)
        self._steering = None if steering is None else read_steering(self._client, steering)
        self._adapter = None if adapter is None else find_adapter(self._client, adapter)
        self._bos = _BOS_POLICIES[add_bos_token]
        self._max_gen_toks = max_gen_toks
        self._prefix_token_id = prefix_token_id
        self._info: TokenizerInfo | None = None

    @property
    def max_length(self) -> int:
        """Tokens that the model reads at once."""
        return self._max_length

    @property
    def max_gen_toks(self) -> int:
        """Tokens generated where a task does not say how many."""
        return self._max_gen_toks

    @property
    def batch_size(self) -> int:
        """Sequences in one HTTP request."""
        return self._batch_size

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's digest: the harness tells its caches of requests apart by it."""
        provenance = self._card.provenance
        return provenance.tokenizer_digest if provenance else self._card.id

    def get_model_info(self) -> dict[str, Any]:
        """Return what computed the numbers, for the harness's record of the run."""
        provenance = self._card.provenance
        changes: dict[str, Any] = {}
        if self._steering is not None:
            changes["steering"] = self._steering
        if self._adapter is not None:
            changes["adapter"] = self._adapter.model_dump()
        return {"model_provenance": provenance.model_dump() if provenance else None, **changes}

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the model's chat template, for the harness's record of the run."""
        return self._tokenizer_info().chat_template if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Write a conversation as text; LogsteerError where the model has no chat template."""
        return render_chat(self._tokenizer_info(), chat_history, add_generation_prompt)

    @property
    def eot_token_id(self) -> int:
        """The end-of-sequence token; LogsteerError where the tokenizer has none."""
        eos = self._tokenizer_info().eos_token
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

        # Encoded where they are scored: so the server cuts texts while its engine is at work.
        def score(batch: list[Pair]) -> list[Scored]:
            return self._score(self._encode_pairs(batch))

        def weigh(pair: Pair) -> int:
            return (len(pair[0]) + len(pair[1])) // _CHARS_PER_TOKEN

        return self._run(score, cut_slices(pairs, self._batch_size, weigh), pairs, disable_tqdm)

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Score each whole text, read in disjoint windows."""
        texts = [request.args[0] for request in requests]
        tokens = self._tokenize(texts, self._bos)
        windows: list[Encoded] = []
        owners: list[int] = []
        for owner, text in enumerate(texts):
            for pair in get_rolling_token_windows(
                tokens[text], self.prefix_token_id, self.max_length, context_len=1
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
            for batch in cut_slices(places, self._batch_size, lambda _: self.max_length)
        ]

        def generate(batch: list[int]) -> list[str]:
            prompts = [tokens[requests[place].args[0]] for place in batch]
            return self._generate(prompts, settings[batch[0]])

        found = [""] * len(settings)
        with tqdm(total=len(found), disable=disable_tqdm, desc="Generating") as bar:
            for batch, texts in run_concurrently(generate, batches):
                for place, text in zip(batch, texts, strict=True):
                    found[place] = text
                    self.cache_hook.add_partial("generate_until", requests[place].args, text)
                bar.update(len(batch))
        return found

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
        def weigh(request: Encoded) -> int:
            return len(request[1]) + len(request[2])

        batches = cut_slices(requests, self._batch_size, weigh)
        return self._run(self._score, batches, [request[0] for request in requests], disable_tqdm)

    def _run(
        self,
        score: Callable[[list[T]], list[Scored]],
        batches: list[list[T]],
        pairs: Sequence[Pair | None],
        disable_tqdm: bool,
    ) -> list[Scored]:
        """Score all batches; `pairs` are the requests that they belong to, for caches."""
        scores: list[Scored] = []
        with tqdm(total=len(pairs), disable=disable_tqdm, desc="Scoring") as bar:
            for batch, found in run_concurrently(score, batches):
                for pair, result in zip(pairs[len(scores) :], found, strict=False):
                    if pair is not None:
                        self.cache_hook.add_partial("loglikelihood", pair, result)
                scores += found
                bar.update(len(batch))
        return scores

    def _encode_pairs(self, pairs: Sequence[Pair]) -> list[Encoded]:
        """Encode as `TemplateLM.loglikelihood` and `_encode_pair` do, many pairs at once."""
        moved = [_move_space(context, target) for context, target in pairs]
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
            dict.fromkeys(texts), 2 * self._batch_size, lambda text: len(text) // _CHARS_PER_TOKEN
        )
        return {
            text: tokens.token_ids
            for batch, results in run_concurrently(tokenize, batches)
            for text, tokens in zip(batch, results, strict=True)
        }

    def _score(self, requests: Sequence[Encoded]) -> list[Scored]:
        # A continuation without a token of its own is certain, as for the harness's `hf`.
        scores: list[Scored] = [(0.0, True)] * len(requests)
        for batch in make_batches(self._fit(request) for request in requests):
            fields = {"items": batch.items, "columns": ["logprob", "rank"], "per_token": False}
            answer = self._post("logprob", fields, Scores)
            check_adapter(self._adapter, answer.adapter)
            targets = [target for item in answer.results for target in item.targets]
            for places, target in zip(batch.places, targets, strict=True):
                logprob = target.logprob
                if logprob is None:
                    warning_once(_log, "log-probabilities are not finite: they are given as NaN")
                    logprob = math.nan
                for place in places:
                    scores[place] = (logprob, target.is_greedy)
        return scores

    def _fit(self, request: Encoded) -> tuple[Ids, Ids]:
        """Return the context, cut at the left to what the model reads, and the continuation."""
        text, context, target = request
        excess = len(context) + len(target) - (self.max_length + 1)
        if excess > 0:
            if excess >= len(context):
                raise ValueError(
                    f"a continuation has {len(target)} tokens, and the model reads "
                    f"{self.max_length} at once: {text!r:.200}"
                )
            warning_once(_log, f"contexts are cut at the left to max_length {self.max_length}")
            return context[excess:], target
        if not target:
            warning_once(_log, f"a continuation without a token is certain, as {text!r:.200}")
        return context, target

    def _tokenizer_info(self) -> TokenizerInfo:
        if self._info is None:
            self._info = self._client._ask("tokenizer_info", model=self._card.id)
        return self._info

    def _post(self, name: str, fields: Mapping[str, Any], schema: type[A]) -> A:
        endpoint = ENDPOINTS[name]
        fields = {"model": self._card.id, **fields}
        if name != "tokenize":
            if self._steering is not None:
                fields["steering"] = self._steering
            if self._adapter is not None:
                fields["adapter"] = self._adapter.name
        body = json.dumps(fields, separators=(",", ":")).encode()
        answer: A = self._client._answer(ApiCall(endpoint.method, endpoint.path, schema, body))
        return answer


def _move_space(context: str, target: str) -> tuple[str, str]:
    bare = context.rstrip()
    return bare, context[len(bare) :] + target


def main() -> None:
    """Run lm-evaluation-harness's own command, which knows `--model logsteer` by now."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
