"""Answers as flat rows: what tables, CSV files and pandas have of them.

Each kind of answer has rows of one or more grains, such as one a token or one a target. Arrays of
an answer are columns; nothing is left out, and nothing is computed that an answer does not say.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import BaseModel

from logsteer._pairs import LogProbs
from logsteer.errors import LogsteerError
from logsteer.extras import import_package
from logsteer.extras.dose_response import DoseResponse
from logsteer.extras.labels import label_layers
from logsteer.schemas import (
    AdapterCard,
    AdapterList,
    CaptureCard,
    CaptureList,
    Completion,
    GenerateAnswer,
    GradientAnswer,
    ItemGradients,
    ItemScore,
    LensAnswer,
    LensItem,
    LensTarget,
    LogprobAnswer,
    ModelCard,
    ModelList,
    OverrideCard,
    OverrideList,
    PatchAnswer,
    PatchResult,
    PerplexityAnswer,
    PromptCompletions,
    SaeCard,
    SaeList,
    SelftestAnswer,
    SteerAnswer,
    SteeringReceipt,
    SweepAnswer,
    SweepPoint,
    TargetGradient,
    TargetScore,
    TextResult,
    TokenizeAnswer,
    TrainAnswer,
    VariantCard,
    VariantList,
    VectorCard,
    VectorList,
    WindowScore,
)
from logsteer.schemas.chat import Encoded
from logsteer.schemas.common import Float, ProbeReadings, RowColumns
from logsteer.schemas.perplexity import TokenScores

if TYPE_CHECKING:
    import pandas as pd

FlatRow: TypeAlias = dict[str, Any]
_Write: TypeAlias = Callable[[Any], Iterable[FlatRow] | None]

_TARGET = ("target", "logprob", "prob", "perplexity", "num_tokens", "num_bytes", "is_greedy")
_TARGET_END = ("boundary", "truncated_tokens")
_TEXT = (
    "perplexity", "sum_logprob", "sum_squared_logprob", "num_tokens", "num_scored", "num_bytes",
    "num_chars", "num_words", "word_perplexity", "byte_perplexity", "bits_per_byte", "stderr",
)  # fmt: skip


def list_rows(answer: Any, per: str | None = None) -> list[FlatRow]:
    """Return the rows of an answer, of the grain `per`, such as "token".

    None: the first grain of its kind that the answer has. Raises LogsteerError for a grain that
    does not exist, or was not requested.
    """
    writers = _find_writers(answer)
    if per is None:
        found = (find_rows(answer, grain) for grain in writers)
        return next((rows for rows in found if rows is not None), [])
    if per not in writers:
        raise LogsteerError(f"there is no row per {per}, but one per {' or '.join(writers)}")
    rows = find_rows(answer, per)
    if rows is None:
        raise LogsteerError(f"the answer has no {per}s: {_MISSING.get(per, 'ask for them')}")
    return rows


def find_rows(answer: Any, per: str) -> list[FlatRow] | None:
    """Return the rows of a grain; None where the answer was not asked for them, or has none."""
    write = _find_writers(answer).get(per)
    found = None if write is None else write(answer)
    return None if found is None else list(found)


def list_grains(kind: type) -> list[str]:
    """Return what `per` may be for answers of this class, the usual one first."""
    return list(_WRITERS.get(kind, {}))


def to_frame(answer: Any, per: str | None = None) -> "pd.DataFrame":
    """Return the rows of an answer, or rows, as a table of pandas; integers stay so beside nulls.

    Raises ImportError that says what to install, and what `list_rows` raises.
    """
    missing = 'tables need pandas: pip install "logsteer[tables]"'
    pandas = import_package("pandas", ImportError(missing))
    rows = answer if isinstance(answer, list) else list_rows(answer, per)
    frame: pd.DataFrame = pandas.DataFrame(rows)
    for name in frame.columns:
        kinds = {type(row.get(name)) for row in rows}
        if kinds == {int, type(None)}:
            frame[name] = pandas.array([row.get(name) for row in rows], dtype="Int64")
    return frame


def place_readings(
    probes: Sequence[ProbeReadings] | None, places: Sequence[int]
) -> dict[str, dict[int, Float]]:
    """Return what probes have read, by names such as `mood@2: cosine`, and by place.

    Entry i is of the token at `places[i]`; those of a context, where requested, come
    before the first. A probe that was asked for twice is numbered.
    """
    seen: Counter[str] = Counter()
    named: dict[str, dict[int, Float]] = {}
    for read in probes or ():
        name = f"{read.name or 'probe'}@{read.layer}: {read.read}"
        seen[name] += 1
        if seen[name] > 1:
            name += f" ({seen[name]})"
        for key, context, own in (
            (name, read.context_before, read.before),
            (f"{name} after", read.context_after, read.after),
        ):
            if own:
                named[key] = dict(enumerate(context or (), places[0] - len(context or ())))
                named[key] |= zip(places, own, strict=True)
    return named


def _find_writers(answer: Any) -> Mapping[str, _Write]:
    for kind in type(answer).__mro__:
        if kind in _WRITERS:
            return _WRITERS[kind]
    raise LogsteerError(f"{type(answer).__name__} has no rows")


def _pick(model: BaseModel, names: Iterable[str]) -> FlatRow:
    return {name: getattr(model, name) for name in names}


def _write_tokens(
    tokens: Sequence[str] | None,
    token_ids: Sequence[int] | None,
    logprobs: Sequence[Float] | None,
    found: RowColumns,
    positions: Sequence[int] | None = None,
) -> Iterator[FlatRow]:
    """Yield a row for each token of a sequence, with all that was read of it.

    A token of a context that a probe has read has a row, too, of its readings alone; its place is
    below 0 where the sequence has no `positions` in a text.
    """
    columns: dict[str, Sequence[Any]] = {"token": tokens} if tokens is not None else {}
    columns |= {"token_id": token_ids} if token_ids is not None else {}
    columns |= {"logprob": logprobs} if logprobs else {}
    columns |= {"rank": found.ranks} if found.ranks is not None else {}
    columns |= found.columns or {}
    count = max(map(len, columns.values()), default=0)
    numbers = {place: n for n, place in enumerate(positions or range(count))}
    readings = place_readings(found.probes, list(numbers))
    for place in sorted(numbers.keys() | {place for read in readings.values() for place in read}):
        number = numbers.get(place)
        row = {name: None if number is None else values[number] for name, values in columns.items()}
        own = {name: read.get(place) for name, read in readings.items()}
        yield {"place" if positions is None else "position": place, **row, **own}


# ------------------------------------------------------------------ scores


def _write_target(target: TargetScore) -> FlatRow:
    row = _pick(target, _TARGET)
    variants, both = getattr(target, "variants", None), {}
    if variants is not None:
        both = {
            "logprob_with_space": variants.with_space.logprob,
            "logprob_without_space": variants.without_space.logprob,
            "logprob_any_space": getattr(target, "logprob_any_space", None),
        }
    ends = {f"{name}_mean": one.mean for name, one in (target.aggregates or {}).items()}
    return {**row, **both, **ends, **_pick(target, _TARGET_END), "flags": ",".join(target.flags)}


def _write_target_tokens(target: TargetScore) -> Iterable[FlatRow] | None:
    if target.logprobs is None and target.columns is None:
        return None
    return _write_tokens(target.tokens, target.token_ids, target.logprobs, target)


def _write_item(item: ItemScore) -> Iterator[FlatRow]:
    for index, target in enumerate(item.targets):
        share = item.choice_probs[index] if index < len(item.choice_probs) else None
        row = _write_target(target)
        yield {"target": row.pop("target"), "choice_prob": share, "best": index == item.best, **row}


def _of_each(
    parts: str, write: _Write, head: Callable[[int, Any], FlatRow] = lambda _number, _part: {}
) -> _Write:
    """Return a writer of the rows of each part of an answer, all of which begin with its `head`.

    It gives None where no part was asked for such rows.
    """

    def write_part(part: Any) -> Iterable[FlatRow] | None:
        problem = getattr(part, "problem", None)
        return [{"problem": problem.detail}] if problem else write(part)

    def write_all(answer: Any) -> Iterable[FlatRow] | None:
        found = [(head(n, one), write_part(one)) for n, one in enumerate(getattr(answer, parts))]
        if found and all(rows is None for _, rows in found):
            return None
        return ({**first, **row} for first, rows in found for row in rows or ())

    return write_all


def _of_asked(name: str, write: Callable[[Any, Any], Iterable[FlatRow]]) -> _Write:
    """Return a writer of what an answer has in a field; it gives None where that was not asked."""
    return lambda part: None if (found := getattr(part, name)) is None else write(part, found)


# ------------------------------------------------------------------ texts


def write_window(window: WindowScore) -> FlatRow:
    """Return the row of a window: what it reads, and what its scored tokens come to."""
    row = window.model_dump(exclude={"text"})  # a column before it has the number
    count, total = window.num_scored, window.sum_logprob
    return row | {"mean_logprob": None if total is None or not count else total / count}


def _write_text_tokens(_: TextResult, found: TokenScores) -> Iterable[FlatRow]:
    return _write_tokens(found.tokens, found.token_ids, found.logprobs, found, found.positions)


# ------------------------------------------------------------------ continuations


def _write_completion(completion: Completion) -> FlatRow:
    names = ("text", "logprob", "num_tokens", "finish_reason", "seed")
    ends = {f"{name}_mean": one.mean for name, one in (completion.aggregates or {}).items()}
    return {**_pick(completion, names), **ends}


def _write_completion_tokens(made: Completion) -> Iterable[FlatRow]:
    return _write_tokens(made.tokens, made.token_ids, made.logprobs, made)


def list_completions(result: PromptCompletions) -> Iterator[tuple[FlatRow, Completion]]:
    """Yield each completion of a prompt and its number, after each its unsteered neighbour."""
    for index, completion in enumerate(result.completions):
        if result.baseline is None:
            yield {"completion": index}, completion
            continue
        yield {"completion": index, "steered": True}, completion
        yield {"completion": index, "steered": False}, result.baseline[index]


def _write_prompt(result: PromptCompletions) -> Iterator[FlatRow]:
    for which, completion in list_completions(result):
        yield {**which, **_write_completion(completion)}


def _write_prompt_tokens(result: PromptCompletions) -> Iterator[FlatRow]:
    for which, completion in list_completions(result):
        for row in _write_completion_tokens(completion):
            yield {**which, **row}


# ------------------------------------------------------------------ sweeps, vectors, the rest


def _write_sweep(answer: SweepAnswer) -> Iterator[FlatRow]:
    plain = [answer.unsteered] if all(point.scale for point in answer.points) else []
    for point in [*plain, *answer.points]:
        yield from _write_point(point)


def _write_point(point: SweepPoint) -> Iterator[FlatRow]:
    """Yield a row for each target and each text; what is of the other is null."""
    layers = None if point.layers is None else label_layers(point.layers)
    where = {"layers": layers, "scale": point.scale, "relative_norm": point.relative_norm}
    none = dict.fromkeys(
        ("item", "target", "logprob", "change", "kl", "text", "perplexity", "num_scored")
    )
    for number, item in enumerate(point.items):
        for place, target in enumerate(item.targets):
            found = {"item": number, "target": place, "kl": item.kl}
            yield {**where, **none, **found, **_pick(target, ("logprob", "change"))}
    for number, text in enumerate(point.texts):
        found = {"text": number, "logprob": text.sum_logprob}
        yield {**where, **none, **found, **_pick(text, ("perplexity", "num_scored"))}


def _write_layers(card: VectorCard) -> Iterator[FlatRow]:
    quality: Mapping[str, Any] = card.about.quality or {}
    for layer, norm in card.norms.items():
        found = quality.get(layer)
        told = {} if found is None else found.model_dump()
        yield {"name": card.name, "layer": layer, "hook": card.hook, "norm": norm, **told}


def _write_receipt(receipt: SteeringReceipt) -> Iterator[FlatRow]:
    for layer, site in receipt.layers.items():
        yield {"layer": layer, "tokens": site.tokens, "relative_norm": site.relative_norm}


def _write_card(card: VectorCard) -> Iterator[FlatRow]:
    row = _pick(card, ("name", "sha256", "hook", "width", "bytes", "created"))
    about = card.about
    source = {"source": about.source, "method": about.method, "pairs": about.pairs}
    yield {**row, "layers": label_layers(card.layers), **source}


def _write_plain(model: BaseModel) -> Iterator[FlatRow]:
    """Yield the fields of a card that are no lists or objects; lists of words as one text."""
    row = model.model_dump(mode="json")
    lists = {name: value for name, value in row.items() if isinstance(value, list)}
    told = {name: ", ".join(map(str, value)) for name, value in lists.items()}
    yield {name: value for name, value in (row | told).items() if not isinstance(value, dict)}


def _write_variant(card: VariantCard) -> Iterator[FlatRow]:
    """Yield the fields of a variant, and the names of its vectors with their scales."""
    told = [
        f"{one.get('name') or one.get('sae') or 'data'}:{one.get('scale', 1)}"
        for one in (card.steering or {}).get("vectors", [])
    ]
    override = card.override and card.override.name
    for row in _write_plain(card):
        yield {**row, "steering": ", ".join(told) or None, "override": override}


def _write_model(card: ModelCard) -> Iterator[FlatRow]:
    """Yield what is known of a model, and how many of its replicas answer."""
    ready = sum(replica.state == "ready" for replica in card.replicas)
    told = {"replicas": f"{ready}/{len(card.replicas)}"} if card.replicas else {"replicas": None}
    for row in _write_plain(card):
        yield row | told


def _write_nearest(answer: TrainAnswer) -> Iterator[FlatRow]:
    """Yield the stored vectors that a new one is most like, by layer."""
    for layer, found in answer.similar.layers.items():
        for one in found:
            yield {"layer": layer, "nearest": one.name, "cosine": one.cosine}


def _write_encoded(encoded: Encoded) -> Iterator[FlatRow]:
    for place, (number, token, span) in enumerate(
        zip(encoded.token_ids, encoded.tokens, encoded.offsets, strict=True)
    ):
        start, end = (None, None) if span is None else span
        yield {"place": place, "token": token, "token_id": number, "start": start, "end": end}


def _write_gradient(target: TargetGradient) -> Iterator[FlatRow]:
    names = ("target", "logprob", "num_context", "boundary", "truncated_tokens", "directional",
             "baseline_logprob", "convergence_delta")  # fmt: skip
    yield {**_pick(target, names), "num_tokens": len(target.token_ids)}


def _write_lens_tokens(target: LensTarget) -> Iterator[FlatRow]:
    for layer, found in target.layers.items():
        where = {"target": target.target, "layer": int(layer)}
        tops = found.top.tokens if found.top else None
        rows = _write_tokens(target.tokens, target.token_ids, found.logprobs, found)
        for place, row in enumerate(rows):
            yield {**where, **row, **({"predicted": tops[place][0]} if tops else {})}


def _write_lens_layers(target: LensTarget) -> Iterator[FlatRow]:
    for layer, found in target.layers.items():
        yield {"target": target.target, "layer": int(layer), "logprob": found.logprob}


def _write_patches(result: PatchResult) -> Iterator[FlatRow]:
    for layers, values in zip(result.layers, result.matrix, strict=True):
        for position, token, value in zip(result.positions, result.tokens, values, strict=True):
            yield {
                "layers": label_layers(layers), "position": position, "token": token,
                "value": value,
            }  # fmt: skip


def _write_norms(target: TargetGradient, norms: Mapping[str, list[Float]]) -> list[FlatRow]:
    names = [f"norm@{layer}" for layer in norms]
    return [
        {"target": target.target, "position": position, **dict(zip(names, values, strict=True))}
        for position, *values in zip(target.positions or [], *norms.values(), strict=True)
    ]


def _write_attributions(target: TargetGradient, attributions: list[Float]) -> list[FlatRow]:
    parts = zip(target.input_tokens or (), target.input_ids or (), attributions, strict=True)
    return [
        {"target": target.target, "position": position, "token": token, "token_id": number,
         "attribution": attribution}
        for position, (token, number, attribution) in enumerate(parts)
    ]  # fmt: skip


_MISSING = {
    "token": "a request with per_token or tokens set to false gives none",
    "window": "ask with windows=True",
    "position": "ask with respect to layers",
}
_ITEM: Mapping[str, _Write] = {
    "target": _write_item,
    "token": _of_each("targets", _write_target_tokens, lambda _, one: {"target": one.target}),
}
_TEXTS: Mapping[str, _Write] = {
    "token": _of_asked("tokens", _write_text_tokens),
    "window": _of_asked("windows", lambda _, windows: map(write_window, windows)),
    "text": lambda text: [{**_pick(text, _TEXT), "flags": ",".join(text.flags)}],
}  # fmt: skip
_PROMPT: Mapping[str, _Write] = {"completion": _write_prompt, "token": _write_prompt_tokens}
_GRADIENTS: Mapping[str, _Write] = {
    "position": _of_each("targets", _of_asked("norms", _write_norms)),
    "token": _of_each("targets", _of_asked("attributions", _write_attributions)),
    "target": _of_each("targets", _write_gradient),
}
_LENS_TARGET: Mapping[str, _Write] = {"token": _write_lens_tokens, "layer": _write_lens_layers}
_LENS = {grain: _of_each("targets", write) for grain, write in _LENS_TARGET.items()}
_PATCH: Mapping[str, _Write] = {
    "patch": _write_patches,
    "run": lambda result: [_pick(result, ("clean", "corrupted", "truncated_tokens"))],
}


def _of_all(name: str, writers: Mapping[str, _Write]) -> Mapping[str, _Write]:
    return {
        grain: _of_each("results", write, lambda place, _: {name: place})
        for grain, write in writers.items()
    }


_WRITERS: Mapping[type, Mapping[str, _Write]] = {
    TargetScore: {"token": _write_target_tokens, "target": lambda one: [_write_target(one)]},
    ItemScore: _ITEM,
    LogprobAnswer: _of_all("item", _ITEM),
    LogProbs: {"target": lambda records: records},
    TextResult: _TEXTS,
    PerplexityAnswer: _of_all("text", _TEXTS),
    Completion: {"token": _write_completion_tokens, "completion": lambda c: [_write_completion(c)]},
    PromptCompletions: _PROMPT,
    SteerAnswer: _of_all("prompt", _PROMPT),
    GenerateAnswer: _of_all("prompt", _PROMPT),
    SweepAnswer: {"point": _write_sweep},
    VectorCard: {"layer": _write_layers, "vector": _write_card},
    TrainAnswer: {
        "layer": lambda answer: _write_layers(answer.vector),
        "neighbour": _write_nearest,
    },
    SteeringReceipt: {"layer": _write_receipt},
    VectorList: {"vector": _of_each("vectors", _write_card)},
    DoseResponse: {"point": _of_each("points", _write_plain)},
    GradientAnswer: _of_all("item", _GRADIENTS),
    ItemGradients: _GRADIENTS,
    LensAnswer: _of_all("item", _LENS),
    LensItem: _LENS,
    LensTarget: _LENS_TARGET,
    PatchAnswer: _of_all("pair", _PATCH),
    PatchResult: _PATCH,
    Encoded: {"token": _write_encoded},
    TokenizeAnswer: _of_all("text", {"token": _write_encoded}),
    ModelList: {"model": _of_each("models", _write_model)},
    ModelCard: {"model": _write_model},
    SelftestAnswer: {"check": _of_each("checks", _write_plain)},
    AdapterCard: {"adapter": _write_plain},
    AdapterList: {"adapter": _of_each("adapters", _write_plain)},
    OverrideCard: {"override": _write_plain},
    OverrideList: {"override": _of_each("overrides", _write_plain)},
    SaeCard: {"sae": _write_plain},
    SaeList: {"sae": _of_each("saes", _write_plain)},
    CaptureCard: {"capture": _write_plain},
    CaptureList: {"capture": _of_each("captures", _write_plain)},
    VariantCard: {"variant": _write_variant},
    VariantList: {"variant": _of_each("variants", _write_variant)},
}
"""Answer -> grain -> what writes its rows; None where an answer was not asked for them."""
