"""Steering vectors from activations of contrasting texts, and from other vectors.

Axis letters: N pairs, L layers, D width of an activation. Sums are float64, results float32.
"""

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from logsteer.errors import APIError, api_error
from logsteer.schemas import (
    BosPolicy,
    ContrastPair,
    LayerQuality,
    Message,
    Recommendation,
    SimilarVector,
    SimilarVectors,
    TrainMethod,
    TrainRead,
    TrainRequest,
    VectorAbout,
    VectorCard,
)
from logsteer.schemas.captures import CaptureIndex
from logsteer_server.contract.captures import CaptureRead
from logsteer_server.contract.engine import EngineInfo
from logsteer_server.contract.jobs import CaptureJob, CaptureOutput
from logsteer_server.settings import Settings
from logsteer_server.stores.captures import CaptureStore
from logsteer_server.stores.layer_vectors import LayerVectors, Readout, Vector, invalid_vector
from logsteer_server.stores.store import digest_request
from logsteer_server.stores.vectors import VectorStore
from logsteer_server.tasks.activations import CaptureSite, plan_captures
from logsteer_server.tasks.effect import (
    STAGE_SETTINGS,
    STAGE_TOKENS,
    EffectSearch,
    cut_texts,
    find_contrasts,
)
from logsteer_server.tasks.planning import Cover, Planner
from logsteer_server.tasks.reduction import load_moments
from logsteer_server.tasks.run import Batch, BodyTask, Collector, check_count
from logsteer_server.tasks.vector_methods import (
    Covariance,
    Double,
    Folds,
    TrainedVectors,
    compare_layers,
    compare_vectors,
    describe_validation,
    find_direction,
    hold_out,
    judge_layer,
    plan_folds,
    recommend_by_separation,
)
from logsteer_server.text.chat import ChatForm, count_chars
from logsteer_server.text.tokenizer import TextCodec

NEGLIGIBLE = 1e-6
"""A remainder below this share of a vector's norm is rounding error."""
MAX_SIMILAR = 3
"""Most stored vectors that an answer names for each layer: the nearest."""
MAX_BYTES = 2**30
"""Most bytes of activations in memory while a vector is trained."""
COMPARED_VECTORS = 256
"""Most stored vectors that a trained one is compared with; each is read from the store."""


Side: TypeAlias = str | list[Message]
"""One side of a pair."""


def list_sides(pairs: Sequence[ContrastPair]) -> list[Side]:
    """Return the sides of the pairs in order, each pair's positive side first."""
    return [side for pair in pairs for side in (pair.positive, pair.negative)]


def read_sides(
    sides: Sequence[Side], read: TrainRead, form: ChatForm, bos: BosPolicy, codec: TextCodec
) -> Iterator[list[int]]:
    """Yield the tokens of each side.

    With `answer` they end at the end of the assistant's last turn's content. Errors: APIError
    `invalid_request`.
    """
    texts = codec.encode_prompts([side for side in sides if isinstance(side, str)], bos)
    for number, side in enumerate(sides):
        answers = not isinstance(side, str) and side[-1].role == "assistant"
        if read == "answer" and not answers:
            place = name_side(number)
            detail = (
                f"read: answer is for conversations that end in a turn of the assistant, and "
                f"{place} does not; send messages that do, or read last."
            )
            raise api_error("invalid_request", detail, param=place)
        if isinstance(side, str):
            yield next(texts)
            continue
        own = form.ends_in_answer() if read == "answer" else form
        yield codec.encode_ids([codec.render_chat(side, own)])[0]


def name_side(number: int) -> str:
    """Return the path of a side in the request."""
    return f"pairs[{number // 2}].{('positive', 'negative')[number % 2]}"


def plan_pairs(
    sequences: Iterator[list[int]],
    count: int,
    site: CaptureSite,
    info: EngineInfo,
    max_bytes: int,
    cover: Cover,
) -> list[CaptureJob]:
    """Plan one job for each of `count` sequences, those of `read_sides`, in order.

    Errors: as `plan_captures`; APIError `payload_too_large` for activations of more than
    `max_bytes`.
    """
    needed = 4 * count * len(site.capture.layers) * site.width
    if needed > max_bytes:
        detail = (
            f"The activations would take {needed} bytes, at most {max_bytes} are allowed: train on "
            "fewer layers or pairs."
        )
        raise api_error("payload_too_large", detail)
    places = map(name_side, range(count))
    return plan_captures(sequences, places, site, info, cover)[0]


def train_vectors(
    jobs: Sequence[CaptureJob],
    outputs: Sequence[CaptureOutput],
    folds_N: Folds | None,
    method: TrainMethod,
    whiten: bool,
    known: Mapping[int, Covariance] = MappingProxyType({}),
) -> TrainedVectors:
    """Train vectors from the activations of `plan_pairs`' jobs; `folds_N`: the pairs' folds.

    Layers with a `known` covariance are whitened with it.

    Errors: APIError `invalid_vector` if an activation is not finite, or no layer differs.
    """
    stacked_NLD = np.stack([output.activations_LD for output in outputs])
    if not np.isfinite(stacked_NLD).all():
        raise invalid_vector("the model's activations have numbers that are not finite.")
    layers: dict[int, Vector] = {}
    readouts: dict[int, Readout] = {}
    quality: dict[int, LayerQuality] = {}
    held: dict[int, Double] = {}
    for place, layer in enumerate(jobs[0].capture.layers):
        both_ND = stacked_NLD[:, place].astype(np.float64)
        positive_ND, negative_ND = both_ND[0::2], both_ND[1::2]
        find = partial(find_direction, method=method, whiten=whiten, known=known.get(layer))
        direction = find(positive_ND, negative_ND)
        layers[layer] = direction.vector_D.astype(np.float32)
        if direction.readout is not None and layers[layer].any():
            readouts[layer] = direction.readout
        found = None
        if folds_N is not None:
            found = hold_out(positive_ND, negative_ND, folds_N, find)
            held[layer] = found.vectors_FD
        left_out = sum(len(output.sinks.get(layer, ())) for output in outputs)
        judged = judge_layer(positive_ND, negative_ND, found)
        quality[layer] = judged.model_copy(update={"left_out": left_out})
    if not any(vector_D.any() for vector_D in layers.values()):
        raise invalid_vector(
            "the activations of positive and negative texts do not differ at any layer; read mean "
            "in place of last, or choose texts whose last token differs in what came before."
        )
    return TrainedVectors(LayerVectors(layers, jobs[0].capture.hook, readouts), quality, held)


def check_parts(parts: Sequence[LayerVectors | VectorCard]) -> None:
    """Check that vectors can be combined. Errors: APIError `invalid_vector`."""
    for what, values in (
        ("hook", sorted({part.hook for part in parts})),
        ("width", sorted({part.width for part in parts})),
    ):
        if len(values) > 1:
            shown = ", ".join(map(str, values))
            raise invalid_vector(f"vectors of different {what} cannot be combined: {shown}.")


def combine_layer(
    terms: Iterable[tuple[Vector, float]], orthogonal_to: Sequence[Vector] = ()
) -> Vector:
    """Sum one layer of some vectors by weight, and make it orthogonal to `orthogonal_to`: [D].

    Vectors without the layer are skipped. Terms are in memory one at a time. A remainder of
    rounding errors becomes 0.
    """
    total_D: Double | None = None
    size = 0.0
    for vector_D, weight in terms:
        term_D = weight * vector_D.astype(np.float64)
        size = max(size, float(np.linalg.norm(term_D)))
        total_D = term_D if total_D is None else np.add(total_D, term_D, out=total_D)
    assert total_D is not None, "a layer is combined that a vector has"
    left_D = _project_out(total_D, orthogonal_to)
    if np.linalg.norm(left_D) <= NEGLIGIBLE * size:
        left_D = np.zeros_like(left_D)
    return left_D.astype(np.float32)


def _project_out(vector_D: Double, others: Sequence[Vector]) -> Double:
    """Return the vector minus its projection onto the span of the others: [D]."""
    if not others:
        return vector_D
    # Least squares, because the others may depend on each other.
    basis_DK = np.stack(others, axis=1).astype(np.float64)
    weights_K = np.linalg.lstsq(basis_DK, vector_D, rcond=None)[0]
    left: Double = vector_D - basis_DK @ weights_K
    return left


def find_similar(name: str, vectors: LayerVectors, store: VectorStore) -> SimilarVectors:
    """Compare vectors with those stored under other names for the same hook and width.

    It reads at most COMPARED_VECTORS, the latest, and blocks.
    """
    cards = [
        card
        for card in store.list_all().cards
        if (card.hook, card.width) == (vectors.hook, vectors.width)
        and card.name != name
        and vectors.layers.keys() & set(card.layers)
    ]
    cards.sort(key=lambda card: card.created, reverse=True)
    found: dict[int, list[SimilarVector]] = {layer: [] for layer in vectors.layers}
    compared = 0
    for card in cards[:COMPARED_VECTORS]:
        try:
            stored = store.find(card.name)
        except APIError:  # deleted or damaged, which requests for it report
            continue
        compared += 1
        for layer, cosine in compare_vectors(vectors, stored.vectors).items():
            found[layer].append(SimilarVector(name=card.name, sha256=stored.sha256, cosine=cosine))
    for entries in found.values():
        entries.sort(key=lambda entry: -abs(entry.cosine))
    return SimilarVectors(
        layers={str(layer): entries[:MAX_SIMILAR] for layer, entries in found.items()},
        compared=compared,
        left_out=len(cards) - compared,
    )


def find_measured(body: TrainRequest, store: CaptureStore, info: EngineInfo) -> CaptureIndex | None:
    """Return the capture that `whiten` names, or None. Errors: APIError.

    It must be complete, and have the same weights and hook.
    """
    if isinstance(body.whiten, bool):
        return None
    index = store.read(body.whiten)
    faults = {
        "it is not done": index.state != "done",
        "it is of other weights": index.weights_digest != info.weights_digest,
        f"it is of {index.hook}": index.hook != body.hook,
        f"it has layers {index.layers} alone": not set(body.layers or range(info.num_layers))
        <= set(index.layers),
        "it has no covariance: capture with reduce": not (index.request["reduce"] or {}).get(
            "covariance"
        ),
    }
    if found := [fault for fault, is_so in faults.items() if is_so]:
        detail = f"The capture {body.whiten!r} cannot whiten this vector: {found[0]}."
        raise api_error("invalid_request", detail, param="whiten")
    return index


def load_covariances(
    store: CaptureStore, index: CaptureIndex, layers: Sequence[int]
) -> dict[int, Covariance]:
    """Return a capture's covariance at each of these layers; it blocks."""
    moments = load_moments(store, index)
    return {layer: Covariance.of_matrix(moments[f"covariance.{layer}"]) for layer in layers}


class TrainTask(BodyTask[TrainRequest]):
    """A vector from the activations of contrasting texts, stored under the name given."""

    kind = "train"
    applied_fields = ()

    _card: VectorCard
    _similar: SimilarVectors
    _cosines: list[list[float | None]]

    def check_limits(self, settings: Settings) -> None:
        """Bound the number of texts. Errors: APIError `payload_too_large`."""
        check_count("pairs", 2 * len(self._body.pairs), settings.max_items)

    async def plan(self, planner: Planner) -> AsyncGenerator[Batch, None]:
        """Capture all activations in one batch, then train and store."""
        body = self._body
        store = self._stores.vectors
        own = store.of_writable(body.name)
        info = self.info
        asked = body.model_dump(mode="json", exclude={"overwrite", "model"})
        weights = {"model": self.model.id, "weights_digest": info.weights_digest}
        measured = await planner.capacity.call_long(
            find_measured, body, self._stores.captures, info
        )
        made = measured.created if measured else None
        request = digest_request("train", **asked, **weights, measured=made)
        repeated = await planner.capacity.call_long(
            own.find_repeat, body.name, request, overwrite=body.overwrite
        )
        if repeated is not None:
            self._card = repeated
            stored = await planner.capacity.call_long(store.find, body.name)
            await self._compare(stored.vectors, planner)
            return
        read: CaptureRead = "mean" if body.read == "mean" else "last"
        site = CaptureSite.resolve(body.hook, body.layers, read, info, bos_id=self.codec.bos_id)
        sides = list_sides(body.pairs)
        lengths = [len(s) if isinstance(s, str) else count_chars(s) for s in sides]
        planner.cover_text(max(*lengths, *map(len, body.harm_texts)))
        form = ChatForm.of(body, is_whole=True)
        sequences = read_sides(sides, body.read, form, body.bos, self.codec)
        jobs = await planner.run(
            plan_pairs, sequences, len(sides), site, info, MAX_BYTES, planner.cover
        )
        tokens = [job.tokens.tolist() for job in jobs]
        contrasts = find_contrasts(body.pairs, tokens, self.codec.bos_id)
        ends = {one.pair: (tuple(one.positive), tuple(one.negative)) for one in contrasts}
        whole = zip(map(tuple, tokens[0::2]), map(tuple, tokens[1::2]), strict=True)
        folds_N = plan_folds([ends.get(number, pair) for number, pair in enumerate(whole)])
        texts = cut_texts(self.codec.encode_prompts(body.harm_texts, body.bos))
        collector = Collector()
        room = min(STAGE_TOKENS, STAGE_SETTINGS * sum(map(len, tokens))) if contrasts else 0
        yield Batch(jobs, collector.take, room=room)
        known: dict[int, Covariance] = {}
        if measured is not None:
            known = await planner.capacity.call_long(
                load_covariances, self._stores.captures, measured, site.capture.layers
            )
        trained = await planner.capacity.call_long(
            train_vectors, jobs, collector.outputs, folds_N, body.method, bool(body.whiten), known
        )
        quality: Mapping[int, LayerQuality] = trained.quality
        advice: Recommendation | str
        if contrasts:
            search = EffectSearch(
                contrasts, texts, trained, folds_N, body.max_harm, info.num_layers
            )
            async for batch in self._search(search, planner):
                yield batch
            quality, advice = search.describe(), search.recommend()
        else:
            advice = recommend_by_separation(trained, info.num_layers)
        validation = describe_validation(folds_N, len(body.pairs))
        is_found = isinstance(advice, Recommendation)
        about = VectorAbout(
            source="training",
            model=self.model.id,
            weights_digest=info.weights_digest,
            method=body.method,
            read=body.read,
            whiten=body.whiten,
            pairs=len(body.pairs),
            validation=validation.model_copy(update={"caution": None if is_found else advice}),
            quality={str(layer): one for layer, one in quality.items()},
            recommendation=advice if is_found else None,
        )
        self._card = await planner.capacity.call_long(
            store.put, body.name, trained.vectors, about, request, overwrite=body.overwrite
        )
        await self._compare(trained.vectors, planner)

    async def _search(self, search: EffectSearch, planner: Planner) -> AsyncGenerator[Batch, None]:
        """Sample from the unsteered model, then score the samples and the pairs in two stages."""
        samples, drawn = search.plan_samples(self.info), Collector()
        yield Batch(samples, drawn.take)
        search.record_samples(samples, drawn.outputs)
        for plan_stage in (search.plan_coarse, search.plan_fine):
            settings, scored = plan_stage(), Collector()
            jobs = await planner.capacity.call_long(search.plan_jobs, settings)
            yield Batch(jobs, scored.take)
            search.judge(settings, scored.outputs)

    async def _compare(self, vectors: LayerVectors, planner: Planner) -> None:
        """Compare the vectors with one another, and with those stored."""
        self._similar = await planner.capacity.call_long(
            find_similar, self._body.name, vectors, self._stores.vectors
        )
        self._cosines = compare_layers(vectors)

    def report(self) -> dict[str, Any]:
        """Return the card of the stored vector, its quality and similar vectors."""
        return {
            "vector": self._card.model_dump(),
            "layer_cosines": self._cosines,
            "similar": self._similar.model_dump(),
        }
