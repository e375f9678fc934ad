"""Engines through HTTP against transformers in float32: alone, in a batch, on two ranks."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from bench.models import make_model
from logsteer import APIError, Client
from logsteer.schemas import ScoredTarget
from logsteer_server.contract.jobs import CaptureJob
from logsteer_server.numerics.sinks import find_sinks
from tests.conftest import (
    DEMO_MODEL,
    HOOKS,
    SHARED,
    STORIES_MODEL,
    ServerFactory,
    needs_shared,
    vllm_model,
)
from tests.contract.engine_probe import make_jobs
from tests.contract.steering import DATA, HookedReference
from tests.contract.tlens_cases import BATCH
from tests.probes import run_probe

pytestmark = pytest.mark.engine

PER_TOKEN = 1e-4
WAVE = [0.2 * (-1) ** n for n in range(128)]

MODELS = pytest.mark.parametrize(
    ("client", "model", "path"),
    [
        pytest.param("vllm", "demo", DEMO_MODEL, id="demo"),
        pytest.param("vllm", "stories", STORIES_MODEL, id="stories", marks=needs_shared),
        pytest.param("tlens", "demo", DEMO_MODEL, id="tlens"),
    ],
    indirect=["client"],
)


def log_probs(reference: HookedReference, ids: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [T, V] of what follows each token but the last."""
    return reference.logits(ids[:1], ids[1:]).log_softmax(-1)


@pytest.fixture(scope="module")
def references() -> dict[str, HookedReference]:
    paths = {"demo": DEMO_MODEL, "stories": STORIES_MODEL}
    return {name: HookedReference(path) for name, path in paths.items() if path.is_dir()}


def make_items(vocab: int, seed: int, count: int = 40) -> list[dict[str, Any]]:
    """Contexts of 1 to 300 tokens that share beginnings, each with targets of 1 to 40 tokens."""
    draw = random.Random(seed)
    shared = [draw.randrange(10, vocab) for _ in range(300)]
    items = []
    for _ in range(count):
        context = shared[: draw.randrange(1, 250)]
        context += [draw.randrange(10, vocab) for _ in range(draw.randrange(0, 50))]
        targets = [
            [draw.randrange(10, vocab) for _ in range(draw.randrange(1, 40))]
            for _ in range(draw.randrange(1, 4))
        ]
        items.append({"context_ids": context, "target_ids": targets})
    return items


def flatten(client: Client, items: list[dict[str, Any]], model: str) -> list[ScoredTarget]:
    answer = client.logprob(items, model=model, columns=["logprob", "rank", "entropy"], top=3)
    return [target for result in answer.results for target in result.targets]


def differ(a: Sequence[float | None] | None, b: Sequence[float | None] | None) -> float:
    return float(np.abs(np.array(a, dtype=np.float64) - np.array(b, dtype=np.float64)).max())


@MODELS
def test_every_column_is_what_transformers_says(
    client: Client, references: dict[str, HookedReference], model: str, path: Path
) -> None:
    reference = references[model]
    items = make_items(reference.model.config.vocab_size, seed=1)
    targets = iter(flatten(client, items, model))
    worst = 0.0
    for item in items:
        for ids in item["target_ids"]:
            target = next(targets)
            log_p_RV = log_probs(reference, item["context_ids"] + ids)[-len(ids) :]
            own_R = log_p_RV[range(len(ids)), ids]
            worst = max(worst, differ(target.logprobs, own_R.tolist()))
            best = log_p_RV.topk(3)
            assert differ(np.ravel(target.top.logprobs), best.values.flatten().tolist()) < PER_TOKEN
            entropy_R = -(log_p_RV.exp() * log_p_RV).sum(-1)
            assert differ(target.columns["entropy"], entropy_R.tolist()) < PER_TOKEN
            # A rank may differ where another token is as probable to within the tolerance.
            low = 1 + (log_p_RV > own_R[:, None] + PER_TOKEN).sum(-1)
            high = 1 + (log_p_RV > own_R[:, None] - PER_TOKEN).sum(-1)
            ranks = torch.tensor(target.ranks)
            assert ((low <= ranks) & (ranks <= high)).all()
    assert worst < PER_TOKEN


@MODELS
def test_alone_batched_and_shuffled_are_the_same(client: Client, model: str, path: Path) -> None:
    items = make_items(500, seed=2)
    together = [t.logprobs for t in flatten(client, items, model)]
    alone = [t.logprobs for item in items for t in flatten(client, [item], model)]
    order = random.Random(3).sample(range(len(items)), len(items))
    shuffled_flat = iter(flatten(client, [items[i] for i in order], model))
    shuffled = {i: [next(shuffled_flat).logprobs for _ in items[i]["target_ids"]] for i in order}
    in_order = [logprobs for i in range(len(items)) for logprobs in shuffled[i]]
    worst = max(
        max(differ(a, b), differ(a, c)) for a, b, c in zip(together, alone, in_order, strict=True)
    )
    assert worst < BATCH


@needs_shared
def test_a_long_text_is_what_a_plain_loop_in_transformers_says(
    vllm_client: Client, references: dict[str, HookedReference]
) -> None:
    text = (SHARED / "data" / "wikitext2-valid.txt").read_text()[:20_000]
    answer = vllm_client.perplexity(
        [text], model="stories", protocol="sliding", context_length=512, stride=256
    )
    reference = references["stories"]
    ids = AutoTokenizer.from_pretrained(STORIES_MODEL)(text)["input_ids"]
    total, count, previous_end = 0.0, 0, 0
    for begin in range(0, len(ids), 256):
        end = min(begin + 512, len(ids))
        first = max(previous_end, begin + 1)
        log_p_TV = log_probs(reference, ids[begin:end])
        for position in range(first, end):
            total += float(log_p_TV[position - begin - 1, ids[position]])
        count += end - first
        previous_end = end
        if end == len(ids):
            break
    assert answer.total.num_scored == count
    difference = abs(answer.total.sum_logprob - total) / count
    assert difference < 2e-6  # 1e-3 over 500 tokens
    assert answer.total.num_bytes == len(text.encode())


@pytest.mark.parametrize("length", [95, 96, 97])
def test_a_context_is_shared_wherever_it_ends(
    vllm_client: Client, references: dict[str, HookedReference], length: int
) -> None:
    """A context of 96 tokens ends with a cache block, which then has the first wanted row."""
    draw = random.Random(length)
    context = [draw.randrange(10, 1400) for _ in range(length)]
    targets = [[draw.randrange(10, 1400) for _ in range(5)] for _ in range(4)]
    item = {"context_ids": context, "target_ids": targets}
    vllm_client.logprob([{"context_ids": context, "target_ids": targets[:1]}])
    together = vllm_client.logprob([item])
    assert together.usage.cached_tokens == 4 * 64 + (4 * 32 if length > 96 else 0)
    for target, ids in zip(together.results[0].targets, targets, strict=True):
        log_probs_RV = log_probs(references["demo"], [*context, *ids])[length - 1 :]
        wanted = log_probs_RV.gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
        assert differ(target.logprobs, wanted) < PER_TOKEN


def draw_tokens(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, 1400) for _ in range(count)]


def test_what_a_plan_leaves_alone_is_shared_and_nothing_else(vllm_client: Client) -> None:
    """Blocks are of 32 tokens; a plan names those from its first position on."""
    reference = HookedReference(DEMO_MODEL)
    context, target = draw_tokens(71, 100), draw_tokens(72, 70)
    longer = [*context, *target], draw_tokens(73, 8)
    vector = torch.tensor(WAVE)

    def ask(
        cached: int, positions: Any, scale: float = 1.0, text: Any = (context, target), **how: Any
    ) -> None:
        own_context, own_target = text
        vectors = [{"data": {"2": WAVE}, "scale": scale, **how}]
        answer = vllm_client.logprob(
            [{"context_ids": own_context, "target_ids": [own_target]}],
            steering={"vectors": vectors, "positions": positions} if positions else None,
            cache=False,
        )
        assert answer.usage.cached_tokens == cached, (positions, scale, how)
        wanted = reference.logprobs(
            own_context, own_target, lambda x: x + (scale * vector if positions else 0),
            positions or "all", layer=2,
        )  # fmt: skip
        found = answer.results[0].targets[0].logprobs
        assert found == pytest.approx(wanted, abs=PER_TOKEN), (positions, scale, how)

    ask(0, None)
    for scale in (1.0, 2.0, -1.0):
        ask(96, "completion", scale)
    ask(96, "predicting")
    ask(96, "completion", when={"probe": {"data": {"1": WAVE}}, "above": -1e9, "of": "prompt"})
    ask(32, {"slices": [[40, 50], [90, 95]]})
    ask(0, "all")
    ask(96, "all")  # an equal plan came before
    ask(0, "prompt")
    # What follows the first context was read plain by the first, and steered by others.
    ask(160, None, text=longer)
    ask(96, {"slices": [[100, 200]]}, 3.0, text=longer)


def compare_readings(one: Client, two: Client, items: Any, split: str) -> None:
    """Probes at all layers, and a condition that is read and met within one stage."""
    when = {"probe": {"data": {"0": WAVE}}, "above": 0.0}
    scale = 1.0 if split == "tensor_parallel" else 1.01  # so that no prefix is left of the other
    first_near, second_near = (
        {"data": {layer: WAVE}, "when": when, "scale": scale} for layer in ("1", "2")
    )
    near = {"vectors": [first_near, second_near]}
    probes = [{"data": {"0": WAVE}, "layers": [0, 2, 3, 4]}]
    answers = [
        found.logprob(items, steering=near, probes=probes, cache=False) for found in (one, two)
    ]
    first, second = ([t for result in a.results for t in result.targets] for a in answers)
    assert compare(first, second) < PER_TOKEN
    for own, other in zip(first, second, strict=True):
        for a, b in zip(own.probes or (), other.probes or (), strict=True):
            assert differ(a.before, b.before) < PER_TOKEN
            assert differ(a.after, b.after) < PER_TOKEN
    passed = [[v.passed for v in a.steering.vectors] for a in answers if a.steering]
    assert all(count for counts in passed for count in counts)
    if answers[0].usage.cached_tokens == answers[1].usage.cached_tokens:
        assert passed[0] == passed[1]
    far = {"vectors": [{"data": {"4": WAVE}, "when": when}]}
    if split == "pipeline_parallel":
        with pytest.raises(APIError, match="another pipeline stage"):
            two.logprob(items, steering=far)
    else:
        assert two.logprob(items, steering=far).steering is not None


@pytest.mark.parametrize("split", ["tensor_parallel", "pipeline_parallel"])
def test_two_ranks_say_what_one_says(
    vllm_client: Client, request: pytest.FixtureRequest, split: str
) -> None:
    server = request.getfixturevalue(f"{split}_server")
    with Client(server.url, timeout=300) as client:
        compare_ranks(vllm_client, client, split)
        compare_points(client)


def compare_captures(client: Client) -> None:
    """What is captured of layers of both stages while they write is what the text's reading is."""
    ids = draw_tokens(8, 20)
    found = client.generate(
        prompt_ids=[ids], max_tokens=8, seed=3, ignore_eos=True, capture={"layers": [1, 4]}
    ).results[0].completions[0]  # fmt: skip
    whole_LTD = HookedReference(DEMO_MODEL).activations([*ids, *found.token_ids[:-1]])
    for layer in (1, 4):
        captured_TD = np.array(found.activations.layers[layer])
        assert np.abs(captured_TD - whole_LTD[layer]).max() < PER_TOKEN


def compare_points(client: Client) -> None:
    """Every point of layers of both stages is what transformers has there, read and steered."""
    compare_captures(client)
    hooked, wave = HookedReference(DEMO_MODEL), torch.tensor(WAVE)
    ids = np.random.default_rng(6).integers(10, 1400, 40).tolist()
    context, target = ids[:30], ids[30:]
    item = {"context_ids": context, "target_ids": [target]}
    for hook in HOOKS:
        wanted_LTD = hooked.activations(ids, hook)
        read = client.activations([{"token_ids": ids}], [1, 4], hook=hook, read="each")
        for layer in (1, 4):
            assert np.abs(read[0].layers[layer] - wanted_LTD[layer]).max() < PER_TOKEN
            steering = {"vectors": [{"data": {str(layer): WAVE}, "hook": hook}]}
            answer = client.logprob([item], steering=steering, cache=False)
            wanted = hooked.logprobs(context, target, lambda x: x + wave, "all", layer, hook)
            assert differ(answer.results[0].targets[0].logprobs, wanted) < PER_TOKEN


def compare_ranks(vllm_client: Client, client: Client, split: str, model: str = "two") -> None:
    """Hold a model whose ranks are two to the same on one, in all that an engine does."""
    items = make_items(1400, seed=4)
    plain = compare(flatten(vllm_client, items, "demo"), flatten(client, items, model))
    assert plain < PER_TOKEN
    drawn = [
        found.generate("Once upon a time", max_tokens=30, n=6, seed=4, top_p=0.95, top_k=200)
        for found in (vllm_client, client)
    ]
    own, split_up = ([c.token_ids for c in answer.results[0].completions] for answer in drawn)
    assert own == split_up
    vectors = [{"data": {"1": WAVE, "4": WAVE}}, {"data": {"0": WAVE}, "op": "ablate"}]
    answers = [
        found.logprob(items, steering={"vectors": vectors}, cache=False)
        for found in (vllm_client, client)
    ]
    one, two = ([t for result in a.results for t in result.targets] for a in answers)
    steered = compare(one, two)
    assert steered < PER_TOKEN
    one_receipt, two_receipt = (answer.steering for answer in answers)
    assert one_receipt.tokens_steered == two_receipt.tokens_steered > 0
    for answer, receipt in zip(answers, (one_receipt, two_receipt), strict=True):
        assert receipt.layers.keys() == {"0", "1", "4"}
        for site in receipt.layers.values():  # what the prefix cache had was changed before
            assert site.tokens == receipt.tokens_steered - answer.usage.cached_tokens > 0
            assert 0 < (site.relative_norm or 0) < 1
    captures = [
        found.activations(
            [{"token_ids": item["context_ids"]} for item in items[:8]], [0, 2, 4],
            steering={"vectors": vectors[:1]},
        ).layers
        for found in (vllm_client, client)
    ]  # fmt: skip
    for layer in (0, 2, 4):
        assert captures[0][layer] == pytest.approx(captures[1][layer], abs=PER_TOKEN)
        assert np.abs(captures[0][layer]).max(1).min() > 0.01, "a stage has not answered"
    compare_readings(vllm_client, client, items, split)
    pairs = [{"positive": "She was happy.", "negative": "She was sad."}] * 2
    cards = [
        found.vectors.train("of-ranks", pairs, method="mean_difference").vector
        for found in (vllm_client, client)
    ]
    assert cards[0].norms == pytest.approx(cards[1].norms, rel=1e-4)


def compare(one: Sequence[ScoredTarget], two: Sequence[ScoredTarget]) -> float:
    """The largest difference of the targets' log-probabilities."""
    return max(differ(a.logprobs, b.logprobs) for a, b in zip(one, two, strict=True))


def deviate(a: Sequence[float], b: Sequence[float]) -> float:
    """The largest difference of numbers, relative to those beyond 1: what probes read is large."""
    one, two = np.array(a), np.array(b)
    return float((np.abs(one - two) / np.maximum(1, np.abs(one))).max())


def test_chunked_prefill_preemption_and_abort_change_nothing(tmp_path: Path) -> None:
    """`engine_probe.py` says what its engine did under pressure."""
    caches = {"VLLM_CACHE_ROOT": str(tmp_path)}
    probe = run_probe("tests.contract.engine_probe", str(DEMO_MODEL), **caches)
    assert list(tmp_path.rglob("*LlamaForCausalLM.json")), "the caches were empty"
    assert probe["children_s"] < probe["own_s"] / 4, "a first start imports vLLM once"
    assert probe["counted"] == probe["seen"], "preemptions, as metrics have them"
    alone, together, resumed, kept = (
        probe[name] for name in ("alone", "together", "resumed", "kept")
    )
    assert probe["preempted"] > 10
    assert together.keys() == alone.keys()
    worst = max(deviate(alone[i], together[i]) for i in alone)
    assert worst < BATCH
    assert len(resumed) == 4
    assert probe["times_resumed"] > len(resumed), "generation was not thrown out of the cache"
    assert max(deviate(alone[i], resumed[i]) for i in resumed) < BATCH
    assert probe["left"] == 0
    assert not {int(i) for i in kept} & set(probe["cancelled"])
    assert len(kept) + len(probe["cancelled"]) == len(alone)
    assert max(deviate(alone[i], kept[i]) for i in kept) < BATCH
    print(f"captures in flight and of the finished text differ by {probe['recaptured']:.2e}")
    assert probe["recaptured"] < BATCH
    hooked = HookedReference(DEMO_MODEL)
    jobs = make_jobs(hooked.model.config.vocab_size, hooked.model.config.hidden_size)
    captures = {i: job for i, job in enumerate(jobs) if isinstance(job, CaptureJob)}
    assert {job.capture.read for job in captures.values() if job.plan is None} == {
        "each",
        "last",
        "mean",
    }
    for index, job in captures.items():
        if job.plan is None:
            found_LTD = hooked.activations(job.tokens.tolist(), job.capture.hook)
            read_LTD = found_LTD[list(job.capture.layers)][:, job.places]
            wanted = (
                read_LTD
                if job.capture.read != "mean"
                else np.stack(
                    [
                        read_TD[~find_sinks(np.linalg.norm(read_TD, axis=-1))].mean(0)
                        for read_TD in np.asarray(read_LTD)
                    ]
                )
            )
            assert differ(alone[str(index)], wanted.ravel().tolist()) < PER_TOKEN


def test_pieces_that_are_compiled_say_what_layers_say_and_are_reused(tmp_path: Path) -> None:
    """Of 36 layers three differ to the compiler: the first, the last, and those in between."""
    model = make_model(tmp_path, vocab=2048, hidden=64, layers=36)
    found = {
        mode: run_probe("tests.contract.piecewise_probe", mode, str(model))
        for mode in ("eager", "pieces")
    }
    assert found["pieces"]["logprobs"] == pytest.approx(found["eager"]["logprobs"], abs=1e-4)
    assert found["pieces"]["counts"]["num_compiled_artifacts_saved"] == 3


def test_a_second_start_loads_what_the_first_compiled(
    start_server: ServerFactory, tmp_path: Path
) -> None:
    """Steering of every hook is part of it, whatever is in memory that nothing was written to."""
    answers, files = [], []
    for filled in "10":
        models = [vllm_model("again", compile=True, hooks=HOOKS)]
        server = start_server(
            {"models": models}, VLLM_CACHE_ROOT=str(tmp_path), MALLOC_PERTURB_=filled
        )
        with Client(server.url, timeout=300) as client:
            answers += [
                client.logprob(
                    [{"context_ids": [5, 6, 7, 8], "target_ids": [[9, 10], [11, 12]]}],
                    steering=steering,
                )
                .results[0]
                .targets
                for steering in (None, {"vectors": [DATA | {"scale": 1.5}]})
            ]
        files += [(path, path.stat().st_mtime_ns) for path in tmp_path.rglob("rank_*/model")]
        server.stop()
    assert files[0] == files[1]
    assert compare(answers[0], answers[1]) > 0.01
    assert max(map(compare, answers[:2], answers[2:])) < BATCH
