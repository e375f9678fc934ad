"""The client that blocks; `logsteer.async_client` has its twin for asyncio.

Options are keywords, listed in `logsteer._options`; an option left out takes the server's default.
Every method raises the errors of `logsteer.errors`. Log-probabilities are in nats.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import httpx
from pydantic import BaseModel

from logsteer import _calls
from logsteer._adapters import Adapters
from logsteer._call import Call, as_list
from logsteer._calls import GenerateEvent, PerplexityEvent, SteerEvent
from logsteer._exchange import Encoding, exchange
from logsteer._options import (
    DiagnosticsOptions,
    GenerateOptions,
    GradientOptions,
    LogprobOptions,
    PairOptions,
    PerplexityOptions,
    SteeringLike,
    SteerOptions,
    SweepOptions,
    TokenOptions,
    WindowOptions,
)
from logsteer._overrides import Overrides
from logsteer._pairs import pair_items, pair_records, pair_scores
from logsteer._progress import SamplingProgress
from logsteer._settings import read_settings
from logsteer._upload import Source, Upload
from logsteer._vectors import Vectors
from logsteer._wire import Wire
from logsteer.extras.datasets import PROMPT, draw_prompts, read_prompts
from logsteer.extras.datasets import Source as PromptSource
from logsteer.extras.samples import Reward, Sample, Samples, collect
from logsteer.records import LogProb
from logsteer.schemas import (
    DetokenizeAnswer,
    GenerateAnswer,
    GradientAnswer,
    GradientVariable,
    Health,
    ItemScore,
    LogprobAnswer,
    LogprobItem,
    ModelCard,
    ModelList,
    PerplexityAnswer,
    Readiness,
    SteerAnswer,
    SweepAnswer,
    TokenizeAnswer,
)

A = TypeVar("A", bound=BaseModel)


class Client:
    """A blocking client of one server; threads may share it.

    `base_url` and `api_key` are read from LOGSTEER_BASE_URL and LOGSTEER_API_KEY where they are not
    given. `timeout` is in seconds: 600, and 5 for connecting, unless given; `httpx.Timeout(None)`
    sets none. `model` is the default of every request; `transport` replaces the network. With
    `encoding="msgpack"` arrays travel as raw buffers, which suits large answers.

    >>> with Client(model="demo") as client:  # doctest: +SKIP
    ...     client.score("The capital of France is", [" Paris", " London"]).choice_probs
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float | httpx.Timeout | None = None,
        max_retries: int = 2,
        model: str | None = None,
        encoding: Encoding = "json",
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        settings = read_settings(base_url, api_key, timeout, max_retries, model, encoding)
        self._http = httpx.Client(transport=transport, **settings.http_arguments())
        self._terms = settings.terms(self._http.build_request, Upload.chunks)
        self._model = model

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def base_url(self) -> str:
        """The server's address, without a slash at its end."""
        return str(self._http.base_url).rstrip("/")

    @property
    def vectors(self) -> Vectors:
        """The steering vectors that the server keeps."""
        return Vectors(self._answer, self._model)

    @property
    def overrides(self) -> Overrides:
        """The directions of the parameters that the server keeps."""
        return Overrides(self._answer, self._model)

    @property
    def adapters(self) -> Adapters:
        """The LoRA adapters that the server keeps."""
        return Adapters(self._answer, self._model)

    def close(self) -> None:
        """Nothing; the connections are closed."""
        self._http.close()

    def models(self) -> ModelList:
        """Every configured model and its state."""
        return self._answer(_calls.models())

    def model(self, model_id: str) -> ModelCard:
        """The card of one model; NotFoundError where there is none of this id."""
        return self._answer(_calls.model(model_id))

    def health(self) -> Health:
        """That the server's process answers, and its version."""
        return self._answer(_calls.health())

    def ready(self) -> Readiness:
        """Whether every required model answers; also where the server says so with status 503."""
        return self._answer(_calls.ready())

    def logprob(
        self,
        items: Sequence[LogprobItem | Mapping[str, Any]],
        **options: Unpack[LogprobOptions],
    ) -> LogprobAnswer:
        """The exact log-probability of each item's targets after its context.

        An item has `context` and `targets` (text), `context_ids` and `target_ids`, or `messages`
        and `targets`; as a mapping or as a `LogprobItem`.
        """
        return self._answer(_calls.logprob(items, options, self._model))

    def score(
        self, context: str, targets: str | Sequence[str], **options: Unpack[LogprobOptions]
    ) -> ItemScore:
        """The scores of targets after one context: `logprob` for a single item."""
        targets = as_list(targets)
        call = _calls.logprob(pair_items([context], targets), options, self._model)
        return pair_scores(self._answer(call), 1, len(targets))[0]

    def get_log_prob(
        self,
        prompts: str | Sequence[str],
        targets: str | Sequence[str],
        **options: Unpack[PairOptions],
    ) -> list[LogProb]:
        """One record per prompt and target, prompt by prompt, in the order given.

        One request scores them all; each prompt is computed once.
        """
        prompts, targets = as_list(prompts), as_list(targets)
        call = _calls.logprob_pairs(prompts, targets, options, self._model)
        return pair_records(prompts, targets, self._answer(call))

    def perplexity(
        self, texts: str | Sequence[str], **options: Unpack[PerplexityOptions]
    ) -> PerplexityAnswer:
        """The log-likelihood and perplexity of each text, and of all of them together."""
        return self._answer(_calls.perplexity(texts, options, self._model))

    def perplexity_events(
        self, texts: str | Sequence[str], **options: Unpack[PerplexityOptions]
    ) -> Generator[PerplexityEvent, None, None]:
        """The events of scoring texts: a start, each finished window, then the whole answer.

        The request is sent when the first event is asked for. Close the generator to stop early.
        """
        return self._run(_calls.perplexity_events(texts, options, self._model))

    def perplexity_stream(
        self, source: Source, **options: Unpack[WindowOptions]
    ) -> Generator[PerplexityEvent, None, None]:
        """The events of scoring one text that is sent while it is read, of any length.

        `source` is a path, an open file, or an iterable of bytes or text. It is tried again
        after a failure only if it can be read from its beginning again. Over HTTP/1.1 httpx reads
        the answer after it has sent the text: events arrive from then on.
        """
        return self._run(_calls.perplexity_stream(source, options, self._model))

    def diagnostics(
        self,
        items: Sequence[LogprobItem | Mapping[str, Any]],
        **options: Unpack[DiagnosticsOptions],
    ) -> LogprobAnswer:
        """Targets as a sampling policy saw them: every column of each token, and aggregates."""
        return self._answer(_calls.diagnostics(items, options, self._model))

    def generate(
        self, prompts: str | Sequence[str] | None, **options: Unpack[GenerateOptions]
    ) -> GenerateAnswer:
        """Continuations of prompts, with `diagnostics` what the policy saw at every step.

        With `prompt_ids` or `messages` among the options, `prompts` is None.
        """
        return self._answer(_calls.generate(prompts, options, self._model))

    def generate_events(
        self, prompts: str | Sequence[str] | None, **options: Unpack[GenerateOptions]
    ) -> Generator[GenerateEvent, None, None]:
        """The events of `generate`: a start, pieces as they are generated, then the answer."""
        return self._run(_calls.generate_events(prompts, options, self._model))

    def sample(
        self,
        source: PromptSource,
        *,
        field: str = PROMPT,
        count: int | None = None,
        with_replacement: bool = False,
        reward: Reward | None = None,
        batch_size: int = 32,
        progress: bool = True,
        **options: Unpack[GenerateOptions],
    ) -> Samples:
        """Continuations of prompts drawn from a source, and a reward for each.

        `source` is a list of prompts or of rows, a path of JSON lines, or `KIND:NAME` of
        `logsteer.extras.datasets`; `field` is the one that holds a row's prompt. `count` of them
        are drawn (None: all in order), and each is continued `n` times, every time with a seed of
        its own that follows from `seed`. Options are those of `generate`.
        """
        seed = options.get("seed") or 0
        prompts = draw_prompts(read_prompts(source, field), count, with_replacement, seed)
        samples: list[Sample] = []
        with SamplingProgress(len(prompts), progress) as bar:
            for first in range(0, len(prompts), batch_size):
                batch = prompts[first : first + batch_size]
                options["seed"] = seed + len(samples)
                answer = self.generate([row.prompt for row in batch], **options)
                samples += collect(first, batch, answer, reward)
                bar.advance(len(batch))
        return Samples(samples)

    def steer(
        self,
        prompts: str | Sequence[str] | None,
        steering: SteeringLike,
        **options: Unpack[SteerOptions],
    ) -> SteerAnswer:
        """Continuations of prompts under steering, and the receipt of what was done.

        With `prompt_ids` or `messages` among the options, `prompts` is None.
        """
        return self._answer(_calls.steer(prompts, steering, options, self._model))

    def steer_events(
        self,
        prompts: str | Sequence[str] | None,
        steering: SteeringLike,
        **options: Unpack[SteerOptions],
    ) -> Generator[SteerEvent, None, None]:
        """The events of `steer`: a start, pieces as they are generated, then the whole answer.

        The request is sent when the first event is asked for. Close the generator to stop early.
        """
        return self._run(_calls.steer_events(prompts, steering, options, self._model))

    def sweep(
        self,
        steering: SteeringLike,
        scales: Sequence[float],
        **options: Unpack[SweepOptions],
    ) -> SweepAnswer:
        """What becomes of targets and texts at each scale of a steering object."""
        return self._answer(_calls.sweep(steering, scales, options, self._model))

    def gradient(
        self,
        items: Sequence[LogprobItem | Mapping[str, Any]],
        wrt: GradientVariable | Mapping[str, Any],
        **options: Unpack[GradientOptions],
    ) -> GradientAnswer:
        """Derivatives of every target's log-probability.

        `wrt` has `layers`, and `hook` and `positions` as in steering: a gradient for each token's
        activation. Or `override`, a kept direction v: the derivative along it.
        """
        return self._answer(_calls.gradient(items, wrt, options, self._model))

    def tokenize(
        self, texts: str | Sequence[str], **options: Unpack[TokenOptions]
    ) -> TokenizeAnswer:
        """The tokens of each text, with their places in it."""
        return self._answer(_calls.tokenize(texts, options, self._model))

    def detokenize(
        self, token_ids: Sequence[Sequence[int]], *, model: str | None = None
    ) -> DetokenizeAnswer:
        """The text of each sequence of token ids."""
        return self._answer(_calls.detokenize(token_ids, model or self._model))

    def _run(self, call: Call[A]) -> Generator[A, None, None]:
        return Wire(self._http).run(exchange(call, self._terms))

    def _answer(self, call: Call[A]) -> A:
        with closing(self._run(call)) as answers:
            for answer in answers:
                return answer
        raise AssertionError("an exchange delivers an answer or raises")
