"""The self-test: measure over a server's public endpoints what logsteer promises of a model.

Each promise says that log-probabilities of the same tokens are equal when they are computed in two
ways. Texts are scored alone, twice; these values are the reference, and their logits say how much
rounding is to be expected. Then the same tokens are scored in other ways. The result cache is off,
and seeds are fixed, so that a self-test repeats itself.

`logsteer selftest` runs it from anywhere. `POST /models/{id}/selftest` runs the same code in the
server.
"""

import math
import time
from asyncio import gather
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

from logsteer._calls import NOT_GIVEN
from logsteer._endpoints import SelftestEvent
from logsteer.async_client import AsyncClient
from logsteer.errors import InternalError, api_error
from logsteer.schemas import LogprobAnswer, ModelCard, SelftestAnswer, SelftestCheck, Timing, Usage
from logsteer.schemas.perplexity import StreamStart

Values: TypeAlias = Sequence[Sequence[float | None]]
"""Numbers of several texts, one for each scored token."""

PROMISES: Mapping[Any, str] = {
    "repeated": "A text scores the same a second time.",
    "batched": "A text scores in a batch as it does alone.",
    "shuffled": "A text scores the same in another order, among other texts.",
    "target_rows": "A target scores the same as within its whole text.",
    "sampled": "A continuation scores as it was sampled.",
    "steered_sampled": "A steered continuation scores as it was sampled.",
    "drawn": "A token drawn under top_k is one that the policy gives a probability.",
    "zero_scale": "Steering by nothing changes nothing.",
    "steered_neighbour": "Steered texts in a batch do not change an unsteered one.",
    "prefix_cached": "A text scores from the prefix cache as it does without.",
    "chunked": "A text scores the same where it is read in several steps.",
    "replicas": "Each replica gives the same tokens the same scores, steered and not.",
    "against": "The other model gives the same tokens the same scores.",
    "against_steered": "The other model gives the same tokens the same steered scores.",
}
"""What each check shows, in their order."""

SEED = 20_011
TEXTS = (
    "Once upon a time there was a little girl who lived near the sea with her old grandfather, "
    "and every morning the two of them counted the boats that came back from the night.",
    "The committee met on 14 March 2019 and approved, by 7 votes to 2, a budget of 1,482,300.50 "
    "for the repair of the northern bridge; the work is to end before the winter of 2021.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n"
    "    return total / len(values) if values else float('nan')\n",
    "Größe und Maß: naïve façades, 東京の天気は晴れ, привет мир, ∑ x² ≤ 4 → 🙂",
    "Yes, of course.",
    "red red red blue red red red blue red red red blue red red red blue red red red blue",
)
"""Prose, numbers, code, other scripts, a short text, a repetitive text."""
BUILT_IN_TOKENS, PROMPTS, PROMPT_TOKENS, SAMPLE_TOKENS = 160, 4, 24, 96
CONTEXT_TOKENS, CACHED_ROWS, STEP_TOKENS = 9, 8, 16
"""Before a target that is scored apart: no block of a prefix cache is so short. Scored after a
prefix that may be cached. Read in a step."""
DRAW: Mapping[str, Any] = {"temperature": 0.8, "top_k": 20}

EPSILON = {"float64": 2.0**-23, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Machine epsilon by dtype; scores of float64 models are float32, too."""
TF32_EPSILON, QUANTIZED_EPSILON = 2.0**-10, 2.0**-7
"""Machine epsilon of TF32; the step of 8-bit activations between 0 and their largest."""
FLOAT32_TOLERANCE, TOLERATED_FLOORS, RMS_SHARE = 1e-4, 12.0, 0.25
"""What the largest difference may be in float32, and in noise floors elsewhere; what share of that
the root mean square may be.

Rounding hits tokens at random, so that the largest of a thousand errors is three to four times the
root mean square. A fault that moves all tokens alike shows in the latter first.
"""


def measure_noise(logit_scale: float, *cards: ModelCard) -> tuple[float, float]:
    """Return the noise floor of the coarsest of these models, and the tolerance: nats a token.

    With logits of root mean square s, machine epsilon e and L layers, the floor is

        e s sqrt(L) / 2.

    A stream to which each of L layers adds twice is rounded 2 L times, each time by up to e / 2 of
    itself, uniformly: sqrt(2 L) e / sqrt(12), and matrix products round as much again. In bfloat16
    the root mean square of the error was measured at 1.0 floors for a trained model of 5 layers,
    and at 1.2 to 2.7 for random ones of 4 to 64; the largest of a thousand errors at 4 to 12.
    """
    about = [card.provenance for card in cards if card.provenance is not None]
    dtypes = [EPSILON[dtype] for one in about for dtype in (one.dtype, one.logits_dtype)]
    coarse = [TF32_EPSILON * one.tf32 + QUANTIZED_EPSILON * bool(one.quantization) for one in about]
    epsilon = max(dtypes + coarse)
    floor = epsilon * logit_scale * math.sqrt(cards[0].num_layers or 1) / 2
    return floor, TOLERATED_FLOORS * floor if epsilon > EPSILON["float32"] else FLOAT32_TOLERANCE


def subtract(found: Values, wanted: Values) -> list[tuple[float, str]]:
    """Return how far each value is from the one wanted, and its place.

    A value that is not a finite number, null in JSON, differs infinitely.
    """
    return [
        (
            abs(a - b) if a is not None and b is not None and math.isfinite(a - b) else math.inf,
            f"value {place} of {len(own)} of text {number}",
        )
        for number, (own, others) in enumerate(zip(found, wanted, strict=True), 1)
        for place, (a, b) in enumerate(zip(own, others, strict=True), 1)
    ]


@dataclass
class Compared:
    """What a check measured, what that is compared with, and in words how it was measured.

    Nothing compared is nothing shown: `evidence` says why. Where the check did not reach what it is
    about, it fails even without a difference.
    """

    found: Values
    wanted: Values
    evidence: str
    reached: bool = True


def judge(compared: Compared, tolerance: float) -> dict[str, Any]:
    """Return the fields of a `SelftestCheck` that say what was measured."""
    differences, reason = subtract(compared.found, compared.wanted), compared.evidence
    largest, where = max(differences, default=(0.0, ""))
    rms = math.hypot(*(one for one, _ in differences)) / math.sqrt(len(differences) or 1)
    verdict = "passed" if compared.reached else "failed"
    if largest > tolerance or rms > RMS_SHARE * tolerance:
        verdict, reason = "failed", f"{where} differs by {largest:.3g} nats; {reason}"
    is_number = bool(differences) and math.isfinite(largest)
    return {
        "verdict": verdict if differences or verdict == "failed" else "not_run",
        "reason": reason,
        "num_compared": len(differences),
        "largest_difference": largest if is_number else None,
        "rms_difference": rms if is_number else None,
    }


def read_logprobs(answers: Sequence[LogprobAnswer]) -> list[Any]:
    """Return the log-probabilities of each text's scored tokens."""
    return [item.targets[0].logprobs or [] for answer in answers for item in answer.results]


def make_steering(card: ModelCard, norm: float) -> dict[str, Any]:
    """Return steering objects by name, for activations of this norm at the middle layer.

    All use one random direction. `add` and `turn` change an activation by about a quarter, from the
    completion on with `_later`; `some` adds at some tokens; `none` keeps what each layer gives.
    """
    draws = [Random(SEED + n).gauss() for n in range(card.hidden_size or 0)]
    length, layers = math.hypot(*draws), card.num_layers or 0
    data = {str(layers // 2): [x / length for x in draws]}
    add, turn = {"scale": norm / 4}, {"op": "rotate", "scale": 15.0}
    later, nothing = {"positions": "completion"}, {"layers": [*range(layers)], "scale": 0.0}
    ways: dict[str, list[Mapping[str, Any]]] = {
        "add": [add], "turn": [turn], "add_later": [add | later], "turn_later": [turn | later],
        "some": [{**add, "positions": {"slices": [[1, 5], [9, 2**20]]}}],
        "none": [nothing, {**nothing, "op": "ablate"}], "ablate": [{"op": "ablate"}],
    }  # fmt: skip
    return {way: {"vectors": [{"data": data, **one} for one in ways[way]]} for way in ways}


def can_steer(card: ModelCard) -> bool:
    """Return whether a model's residual stream can be steered."""
    return "resid_post" in (card.hooks or ()) and "steering" not in (card.lacks or {})


class _Trial:
    """One self-test: a method for each promise, and what later checks compare with.

    `plain` are the texts' log-probabilities, each scored alone; `steered` those under the steering
    `some`. `samples` are continuations: the check that looks at them, their steering, the item that
    scores them again, the log-probabilities that they were drawn with.
    """

    def __init__(
        self, client: AsyncClient, card: ModelCard, texts: list[list[int]], other: Any, about: str
    ) -> None:
        self.client, self.card, self.texts = client, card, texts
        self.other, self.about_other = other, about
        self.answers, self.plain, self.steered = list[Any](), list[Any](), list[Any]()
        self.samples, self.ways, self.logit_scale = dict[str, Any](), dict[str, Any](), 0.0

    def find_obstacle(self, name: str) -> str | None:
        """Return why a check cannot be run; None where it can."""
        card, other, lacks = self.card, self.other, self.card.lacks or {}
        unsteered = "" if self.ways else lacks.get("steering", "the model has no hook resid_post")
        unnamed = "" if other else "no second model is named; name one as against"
        sizes = {(one.num_layers, one.hidden_size) for one in (card, other or card)}
        unlike = (
            "" if len(sizes) == 1 and can_steer(other or card) else "the other has no such layers"
        )
        return {
            **dict.fromkeys(("steered_sampled", "zero_scale", "steered_neighbour"), unsteered),
            "drawn": "" if "log_q" in (card.columns or ()) else "the engine reads no column log_q",
            "chunked": lacks.get("step_tokens"),
            "replicas": "" if len(card.replicas) > 1 else "the model has one replica",
            "against": unnamed,
            "against_steered": unsteered or unnamed or unlike,
        }.get(name)

    def split(self, *ways: Any, start: int = 1, texts: Any = None) -> Sequence[Any]:
        """Return requests that score texts from a token on, one for each steering object.

        `start` below 0 counts from the end; a context keeps one token.
        """
        items = [
            {"context_ids": ids[:at], "target_ids": [ids[at:]]}
            for ids in (self.texts if texts is None else texts)
            for at in [start if start > 0 else max(1, len(ids) + start)]
        ]
        return [(items, way) for way in ways]

    async def score(self, calls: Sequence[Any], **options: Any) -> list[LogprobAnswer]:
        """Return the answers to requests sent at once."""
        options = {"model": self.card.id, "columns": ["logprob"], "cache": False, **options}
        asked = (self.client.logprob(items, steering=way, **options) for items, way in calls)
        self.answers += (answers := await gather(*asked))
        return answers

    async def read(self, calls: Sequence[Any], **options: Any) -> Values:
        """Return the log-probabilities that `score` finds."""
        return read_logprobs(await self.score(calls, **options))

    async def prepare(self) -> None:
        """Make steering objects, and draw continuations; those of the model as it is are texts."""
        if can_steer(self.card):
            item, layer = {"token_ids": max(self.texts, key=len)}, (self.card.num_layers or 0) // 2
            options: dict[str, Any] = {"layers": [layer], "read": "last", "model": self.card.id}
            read = await self.client._ask("activations", items=[item], **options)
            self.ways = make_steering(self.card, math.hypot(*read.results[0].activations[layer][0]))
        size = min(PROMPT_TOKENS, max(1, (self.card.context_length or 2) // 2))
        prompts = [self.texts[n % len(self.texts)][:size] for n in range(PROMPTS)]
        call = (prompts, None)
        await gather(self.draw("sampled", {}, call), self.draw("drawn", DRAW, call))
        items = [item for _, item, _ in self.samples["sampled"]]
        self.texts += [[*item["context_ids"], *item["target_ids"][0]] for item in items]

    async def draw(self, name: str, policy: Mapping[str, Any], *calls: tuple[Any, Any]) -> None:
        """Draw continuations of prompts, in requests sent at once: prompts, and their steering."""
        length = min(SAMPLE_TOKENS, (self.card.context_length or 2) - len(calls[0][0][0]))
        options = {"max_tokens": length, "seed": SEED, "model": self.card.id, **policy}
        asked = (
            self.client.generate(
                None, prompt_ids=ids, steering=way, ignore_eos=True, cache=False, **options
            )
            for ids, way in calls
        )
        self.answers += (answers := await gather(*asked))
        self.samples[name] = [
            (
                way,
                {"context_ids": one.prompt_ids, "target_ids": [own.token_ids]},
                own.logprobs,
            )
            for (_, way), answer in zip(calls, answers, strict=True)
            for one in answer.results
            for own in one.completions
        ]

    async def repeated(self) -> Compared:
        """Score each text alone, twice; the first scores are the reference."""
        columns = ["logprob", "logit_mean", "logit_std"]
        alone = [self.split(None, texts=[ids]) for ids in self.texts]
        first, again = [
            [answer for one in alone for answer in await self.score(one, columns=columns)]
            for _ in range(2)
        ]
        self.plain = read_logprobs(first)
        read = [answer.results[0].targets[0].columns or {} for answer in first]
        squares = [(x or 0.0) ** 2 for one in read for name in columns[1:] for x in one[name]]
        self.logit_scale = math.sqrt(2 * sum(squares) / len(squares))
        return Compared(read_logprobs(again), self.plain, f"{len(again)} texts, each alone, twice")

    async def batched(self) -> Compared:
        """Score all texts in one request, and again where the result cache may answer."""
        calls = self.split(None)
        found = [row for on in (False, True, True) for row in await self.read(calls, cache=on)]
        return Compared(found, 3 * self.plain, f"{len(found)} texts in batches, one cached")

    async def shuffled(self) -> Compared:
        """Score the texts in another order, with pieces of them in between."""
        draws, count = Random(SEED), len(self.texts)
        both = self.texts + [ids[: draws.randint(2, len(ids))] for ids in self.texts]
        order = draws.sample(range(2 * count), 2 * count)
        rows = await self.read(self.split(None, texts=[both[n] for n in order]))
        found = [rows[order.index(n)] for n in range(count)]
        return Compared(found, self.plain, f"{count} texts among {count} others, in another order")

    async def target_rows(self) -> Compared:
        """Score the last part of each text alone, after a context that no cache can hold."""
        texts = [ids for ids in self.texts if len(ids) > CONTEXT_TOKENS]
        wanted = [row[CONTEXT_TOKENS - 1 :] for row in self.plain if len(row) >= CONTEXT_TOKENS]
        calls, evidence = self.split(None, start=CONTEXT_TOKENS, texts=texts), "the ends of texts"
        return Compared(await self.read(calls), wanted, f"{evidence} after {CONTEXT_TOKENS} tokens")

    async def sampled(self, name: str = "sampled") -> Compared:
        """Score continuations with the steering that they were drawn with, if any."""
        found = await self.read([([item], way) for way, item, _ in self.samples[name]])
        wanted = [row for *_, row in self.samples[name]]
        return Compared(found, wanted, f"{len(found)} continuations, scored again as targets")

    async def steered_sampled(self) -> Compared:
        """Score steered continuations with their steering; and without, to see its effect."""
        prompts = [item["context_ids"] for _, item, _ in self.samples["sampled"]]
        ways = (self.ways[way] for way in ("add", "turn", "add_later", "turn_later"))
        await self.draw("steered_sampled", {}, *zip(([ids] for ids in prompts), ways, strict=True))
        compared = await self.sampled("steered_sampled")
        items = [item for _, item, _ in self.samples["steered_sampled"]]
        effect, _ = max(subtract(await self.read([(items, None)]), compared.found))
        compared.evidence += f"; steering moves their scores by up to {effect:.3g} nats"
        compared.reached = effect > FLOAT32_TOLERANCE
        return compared

    async def drawn(self) -> Compared:
        """Measure how far drawn tokens are from the edge of what the policy draws.

        A token without a probability under q is off by what it lacks to the k-th most probable.
        """
        calls = [([item for _, item, _ in self.samples["drawn"]], None)]
        read: Any = {"columns": ["logprob", "log_q"], "policy": DRAW, "top": DRAW["top_k"]}
        targets: Any = [item.targets[0] for item in (await self.score(calls, **read))[0].results]
        found = [
            [
                max(0.0, top[-1] - p) if q is None or math.isinf(q) else 0.0
                for top, p, q in zip(
                    one.top.logprobs, one.logprobs, one.columns["log_q"], strict=True
                )
            ]
            for one in targets
        ]
        evidence = f"tokens drawn with top_k {DRAW['top_k']}, and the least probable of so many"
        return Compared(found, [[0.0] * len(row) for row in found], evidence)

    async def zero_scale(self) -> Compared:
        """Steer the texts, at every layer, by a vector of scale 0 and an operation that keeps x."""
        (answer,) = await self.score(self.split(self.ways["none"]))
        steered = answer.steering.tokens_steered if answer.steering else 0
        wanted = sum(len(ids) - 1 for ids in self.texts)
        evidence = f"{steered} of {wanted} tokens went through steering, at every layer"
        return Compared(read_logprobs([answer]), self.plain, evidence, steered == wanted)

    async def steered_neighbour(self) -> Compared:
        """Score the texts unsteered while others are steered."""
        answers = await self.score(self.split(*3 * [self.ways["some"], None]))
        self.steered, found = read_logprobs(answers[:1]), read_logprobs(answers[1::2])
        return Compared(found, 3 * self.plain, f"{len(found)} texts, while others were steered")

    def both(self, start: int = 1, times: int = 1) -> tuple[Sequence[Any], Values]:
        """Return requests for all texts, unsteered and steered, and what is wanted of them."""
        ways = [None, *([self.ways["some"]] if self.steered else [])]
        return self.split(*times * ways, start=start), times * (self.plain + self.steered)

    async def prefix_cached(self) -> Compared:
        """Score the ends of the texts, whose beginnings earlier checks have left in the cache."""
        calls, wanted = self.both(start=-CACHED_ROWS)
        answers = await self.score(calls)
        if not (cached := sum(answer.usage.cached_tokens for answer in answers)):
            return Compared([], [], "no token came from a prefix cache; its blocks may be too long")
        evidence = f"{cached} tokens of {len(wanted)} texts came from the prefix cache"
        return Compared(read_logprobs(answers), [row[-CACHED_ROWS:] for row in wanted], evidence)

    async def chunked(self) -> Compared:
        """Score texts of which a step reads only a part."""
        calls, wanted = self.both()
        found = await self.read(calls, step_tokens=STEP_TOKENS)
        return Compared(found, wanted, f"{len(found)} texts, in steps of {STEP_TOKENS} tokens")

    async def replicas(self) -> Compared:
        """Score the texts so often at once that each replica gets some of them."""
        calls, wanted = self.both(times=2 * len(self.card.replicas))
        evidence = f"{len(wanted)} texts at once on {len(self.card.replicas)} replicas"
        return Compared(await self.read(calls), wanted, evidence)

    async def against(self) -> Compared:
        """Score the texts on the other model."""
        found = await self.read(self.split(None), model=self.other.id)
        return Compared(found, self.plain, self.about_other)

    async def against_steered(self) -> Compared:
        """Score the texts on both models with steering of each kind."""
        calls = self.split(*(self.ways[way] for way in ("add", "turn", "ablate")))
        found, own = [await self.read(calls, model=one.id) for one in (self.other, self.card)]
        return Compared(found, own, f"added, turned and ablated; {self.about_other}")


async def run_selftest(
    client: AsyncClient,
    model: str | None = None,
    *,
    texts: Sequence[str] = (),
    token_ids: Sequence[Sequence[int]] = (),
    against: str | None = None,
) -> AsyncGenerator[SelftestEvent, None]:
    """Yield a start, each check as it ends, then the whole answer.

    `model`: the client's own, or the server's default, unless given. It is tested with `texts` or
    `token_ids`, or with built-in texts, and with continuations of them. `against` names a second
    model, which scores the same tokens. Errors: those of `Client.generate` and `Client.model`;
    InvalidRequestError where the second model has another vocabulary.
    """
    began, is_own = time.monotonic(), bool(texts or token_ids)
    read = await client.generate(
        None if token_ids else texts or TEXTS,
        prompt_ids=token_ids or None,
        max_tokens=1,
        cache=False,
        model=model or NOT_GIVEN,
        # A built-in text may be too long, or have tokens that the model lacks.
        on_overflow="error" if is_own else "truncate_left",
        on_error="fail" if is_own else "report",
    )
    found = [one.prompt_ids[: None if is_own else BUILT_IN_TOKENS] for one in read.results]
    card = await client.model(read.model)
    other = await _find_other(client, card, against) if against else (None, "")
    trial = _Trial(client, card, [ids for ids in found if len(ids) > 1], *other)
    about: Any = {"id": read.id.replace("generate", "selftest"), "model": card.id}
    about["provenance"] = read.provenance
    yield StreamStart(**about)
    await trial.prepare()
    checks: list[SelftestCheck] = []
    for name, promise in PROMISES.items():
        try:
            obstacle = trial.find_obstacle(name)
            compared = Compared([], [], obstacle) if obstacle else await getattr(trial, name)()
        except InternalError as error:  # such as steering that the engine did not apply
            if not trial.plain:
                raise
            compared = Compared([], [], error.detail, reached=False)
        cards = [card, trial.other] if trial.other and "against" in name else [card]
        floor, tolerance = measure_noise(trial.logit_scale, *cards)
        told = {"promise": promise, "tolerance": tolerance, "noise_floor": floor}
        checks.append(SelftestCheck(name=name, **told, **judge(compared, tolerance)))
        yield checks[-1]
    yield SelftestAnswer(
        **about,
        verdict="failed" if "failed" in [check.verdict for check in checks] else "passed",
        checks=checks,
        against=against,
        num_texts=len(trial.texts),
        num_tokens=sum(map(len, trial.texts)),
        seconds=time.monotonic() - began,
        usage=Usage(
            **{n: sum(getattr(one.usage, n) for one in trial.answers) for n in Usage.model_fields}
        ),
        timing=Timing(
            **{n: sum(getattr(one.timing, n) for one in trial.answers) for n in Timing.model_fields}
        ),
    )


async def _find_other(client: AsyncClient, card: ModelCard, model: str) -> tuple[ModelCard, str]:
    """Return a second model's card, and what it is. Errors: APIError where it is not comparable."""
    other = await client.model(model)
    own, about = card.provenance, other.provenance
    if own is None or about is None:
        raise api_error("model_loading", f"Model {model} does not answer: {other.detail}.")
    same = {(one.tokenizer_digest, one.vocab_size) for one in (own, about)}
    if model == card.id or len(same) > 1:
        detail = f"{model} is {card.id} itself, or they have different vocabularies: name another "
        raise api_error(
            "invalid_request", f"{detail}model with the same tokenizer.", param="against"
        )
    of = "" if own.weights_digest == about.weights_digest else ", of other weights"
    return other, f"{model} is {about.engine} in {about.dtype}{of}"
