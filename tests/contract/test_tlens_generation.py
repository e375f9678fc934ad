"""Continuations on TransformerLens: tokens, text, ends, who waits and who joins."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from logsteer_server.contract.captures import Capture
from logsteer_server.contract.jobs import (
    CaptureJob,
    GenerateJob,
    GenerateOutput,
    JobResult,
    Policy,
)
from tests.contract.directions import at, read_logprobs, write_direction
from tests.contract.tlens_cases import (
    BATCH,
    GREEDY,
    PER_TOKEN,
    add_plan,
    build,
    check_trace,
    draw_ids,
    run,
    run_pieces,
    whole,
)
from tests.families.checkpoints import FAMILIES
from tests.probes import drain

pytestmark = pytest.mark.engine


def test_greedy_is_transformers_generate_with_prompts_of_any_length(
    engine: Any, reference: Any
) -> None:
    rng = np.random.default_rng(4)
    prompts = [draw_ids(rng, n) for n in (1, 60, 7, 33)]
    outputs = run(engine, *(GenerateJob(ids, 30, policy=GREEDY, top=2) for ids in prompts))
    for ids, output in zip(prompts, outputs, strict=True):
        ids_1T = torch.from_numpy(ids.astype(np.int64))[None]
        expected = reference.generate(
            ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=30, do_sample=False
        )
        assert output.token_ids.tolist() == expected[0, len(ids) :].tolist()
        assert (output.top_ids[:, 0] == output.token_ids).all()
        assert output.top_logprobs[:, 0] == pytest.approx(output.logprobs, abs=BATCH)
        scored = read_logprobs(reference, np.concatenate([ids, output.token_ids]))
        assert output.logprobs == pytest.approx(scored[-len(output.token_ids) :], abs=PER_TOKEN)


def test_a_seed_decides_whatever_else_is_in_the_batch(engine: Any, prompt: np.ndarray) -> None:
    jobs = [
        GenerateJob(prompt[: 2 + i % 3], 40, seed=i, policy=Policy(1.0, 200, 0.95, 0.01), top=i % 3)
        for i in range(9)
    ]
    together = run(engine, *jobs)
    assert len({tuple(output.token_ids.tolist()) for output in together}) == 9
    for job, output in zip(jobs, together, strict=True):
        alone = run(engine, job)[0]
        assert alone.token_ids.tolist() == output.token_ids.tolist()
        assert alone.text == output.text
        assert alone.logprobs == pytest.approx(output.logprobs, abs=BATCH)
    unseeded = run(engine, *(GenerateJob(prompt, 40) for _ in range(5)))
    assert len({output.text for output in unseeded}) > 1


def test_stop_strings_and_streams(engine: Any, prompt: np.ndarray) -> None:
    plain = GenerateJob(prompt, 40, policy=GREEDY)
    output = run(engine, plain)[0]
    assert output.finish_reason == "length"
    stop = output.text[21:25]
    for stream in (False, True):
        job = GenerateJob(prompt, 40, policy=GREEDY, stop=(stop, "never"), stream=stream)
        pieces = run_pieces(engine, {0: job, 1: plain})[0]
        text = "".join(piece.text for piece in pieces if isinstance(piece, GenerateOutput))
        assert text == output.text[: output.text.index(stop)]
        ids = [i for p in pieces if isinstance(p, GenerateOutput) for i in p.token_ids.tolist()]
        assert ids == output.token_ids[: len(ids)].tolist()
        assert len(ids) < 40
        reasons = [p.finish_reason for p in pieces if isinstance(p, GenerateOutput)]
        assert reasons == [None] * (len(ids) - 1 if stream else 0) + ["stop"]


def test_the_text_is_what_the_tokens_say(tokenizer: Any) -> None:
    from logsteer_server.engines.drawn import GrowingText

    backend = tokenizer.backend_tokenizer
    said = " naïve 😀 — ok\n  日本語, then… again 👩‍🚀!"
    before = tokenizer("Once")["input_ids"]
    ids = backend.encode("Once" + said, add_special_tokens=False).ids[len(before) - 1 :]
    assert len(ids) > len(said)  # else no character takes several tokens
    text = GrowingText(backend, before, (), include_stop=False)
    pieces = []
    for token in ids:
        assert not text.add(token)
        pieces.append(text.pop(False))
    assert not text.end()
    assert "".join(pieces) + text.pop(True) == said
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    for count in range(len(ids) + 1):  # many of these end within a character
        grown, whole = (GrowingText(backend, before, (), include_stop=False) for _ in range(2))
        for token in ids[:count]:
            grown.add(token)
        whole.add_all(ids[:count])
        grown.end()
        whole.end()
        assert whole.pop(True) == grown.pop(True)
    cut = GrowingText(backend, before, ("語, t", "zzz"), include_stop=False)
    taken = [token for token in ids if not cut.add(token)]
    assert cut.pop(True).startswith(" naïve 😀 — ok\n  日本")
    assert len(taken) < len(ids)


def test_spaces_between_words_are_kept_where_a_text_may_not_begin_with_one() -> None:
    from logsteer_server.engines.drawn import DrawnTokens, GrowingText

    pieces = ["<unk>", "▁a", "▁b", "c", "<0xC3>", "<0xA9>"]
    model = models.WordLevel({piece: i for i, piece in enumerate(pieces)}, "<unk>")
    sentencepiece = Tokenizer(model)
    sentencepiece.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    assert sentencepiece.decode([1, 2]) == "a b"
    text = GrowingText(sentencepiece, [1], (), include_stop=False)
    taken = []
    for token in (2, 3, 1, 4, 5, 2, 4):
        text.add(token)
        taken.append(text.pop(False))
    assert taken == [" b", "c", " a", "", "é", " b", ""]
    text.end()
    assert text.pop(True) == "\N{REPLACEMENT CHARACTER}"  # a character that nothing completed
    drawn, texts = (2, 3, 1, 4), []
    for stream in (False, True):
        job = GenerateJob(np.array([1], np.int32), len(drawn), logprobs=False, stream=stream)
        tokens = DrawnTokens(job, (), sentencepiece)
        assert [tokens.add(token, None) for token in drawn] == [None, None, None, "length"]
        texts.append(tokens.pop("length").text)
    assert texts == [" bc a\N{REPLACEMENT CHARACTER}"] * 2


def test_the_end_of_sequence_ends_unless_ignored(engine: Any, tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    ends, goes_on = run(
        engine,
        GenerateJob(ids, 60, policy=GREEDY),
        GenerateJob(ids, 60, policy=GREEDY, ignore_eos=True),
    )
    assert ends.finish_reason == "stop"
    assert ends.token_ids[-1] == tokenizer.eos_token_id
    assert "Paris" in ends.text
    assert "</s>" not in ends.text
    assert goes_on.finish_reason == "length"
    assert len(goes_on.token_ids) == 60
    assert goes_on.text.startswith(ends.text)


def test_cancelled_jobs_go_at_once_and_leave_the_others_as_they_are(
    engine: Any, prompt: np.ndarray
) -> None:
    plans = [None, add_plan()]
    jobs = {i: GenerateJob(prompt[: 2 + i], 40, seed=i, plan=plans[i % 2]) for i in range(4)}
    alone = {i: run(engine, job)[0] for i, job in jobs.items()}
    engine.add(list(jobs.items()))
    found: dict[int, JobResult] = {}
    for _ in range(10):
        found |= dict(engine.step())
    engine.cancel([0, 3, 77])
    engine.add([(9, GenerateJob(prompt, 40, seed=9)), (10, whole(prompt))])
    engine.cancel([9, 10])
    found |= drain(engine)
    assert found.keys() == {1, 2}
    for i, output in found.items():
        assert output.token_ids.tolist() == alone[i].token_ids.tolist()
        assert output.logprobs == pytest.approx(alone[i].logprobs, abs=BATCH)
        assert (output.trace and output.trace.tokens) == (alone[i].trace and alone[i].trace.tokens)
    engine.add([(5, jobs[1])])
    engine.step()
    engine.cancel([5])
    assert not engine.busy
    assert engine.step() == []


def test_a_steered_row_is_cancelled_after_another_has_ended(
    engine: Any, prompt: np.ndarray
) -> None:
    jobs = [GenerateJob(prompt, n, seed=n, ignore_eos=True, plan=add_plan()) for n in (3, 40, 20)]
    alone = run(engine, jobs[2])[0]
    engine.add(list(enumerate(jobs)))
    while [i for i, _ in engine.step()] != [0]:
        pass
    engine.step()
    engine.cancel([1])
    found = dict(result for _ in range(20) for result in engine.step())
    assert found.keys() == {2}
    output = found[2]
    assert output.token_ids.tolist() == alone.token_ids.tolist()
    assert (output.trace and output.trace.tokens) == alone.trace.tokens


def test_what_waits_for_cancelled_continuations_starts(
    engine: Any, prompt: np.ndarray, tmp_path: Path
) -> None:
    """Only so many batches under a parameter delta run at once, each with its own parameters."""
    direction = write_direction(tmp_path, {"model.norm.weight": torch.full((128,), 0.1)})
    jobs = [
        GenerateJob(prompt, 40, seed=n, ignore_eos=True, override=at(direction, 0.1 * n))
        for n in range(3)
    ]
    engine.add(list(enumerate(jobs)))
    for _ in range(8):
        assert engine.step() == []
    engine.cancel([0, 1])
    assert engine.busy
    found = [i for _ in range(60) for i, _ in engine.step()]
    assert found == [2]
    assert not engine.busy


def test_nobody_waits_for_a_long_continuation(engine: Any, prompt: np.ndarray) -> None:
    engine.add([(0, GenerateJob(prompt, 500, ignore_eos=True))])
    for _ in range(5):
        assert engine.step() == []
    engine.add([(1, GenerateJob(prompt, 3, ignore_eos=True)), (2, whole(prompt))])
    engine.add([(3, CaptureJob(prompt, capture=Capture((0,))))])
    found = {i for _ in range(10) for i, _ in engine.step()}
    assert found == {1, 2, 3}
    engine.cancel([0])


@pytest.mark.parametrize("steered", [False, True])
def test_continuations_that_arrive_one_by_one(
    engine: Any, prompt: np.ndarray, steered: bool
) -> None:
    """Longer and shorter prompts, arriving one by one, greedy and drawn: each as it is alone."""
    rng = np.random.default_rng(8)
    lengths, counts = (9, 40, 3, 25, 1, 60), (50, 12, 30, 9, 45, 20)
    jobs = [
        GenerateJob(
            draw_ids(rng, length),
            count,
            seed=count,
            policy=GREEDY if length % 2 else Policy(0.8),
            ignore_eos=True,
            top=length % 3,
            stream=length == 25,
            plan=add_plan(seed=length) if steered and length != 9 else None,
        )
        for length, count in zip(lengths, counts, strict=True)
    ]
    alone = [run_pieces(engine, {0: job})[0] for job in jobs]
    found: dict[int, list[Any]] = {i: [] for i in range(len(jobs))}
    for i, job in enumerate(jobs):
        engine.add([(i, job)])
        for _ in range(5):
            for job_id, piece in engine.step():
                found[job_id].append(piece)
    while engine.busy:
        for job_id, piece in engine.step():
            found[job_id].append(piece)
    for i, pieces in enumerate(alone):
        for one, two in zip(pieces, found[i], strict=True):
            assert two.token_ids.tolist() == one.token_ids.tolist()
            assert two.text == one.text
            assert two.logprobs == pytest.approx(one.logprobs, abs=BATCH)
            assert two.top_logprobs == pytest.approx(one.top_logprobs, abs=BATCH)
            check_trace(two.trace, one.trace)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "opt", "bloom"])
def test_continuations_of_other_families(name: str, tmp_path: Path) -> None:
    """Sliding windows of 32 tokens, some layers of them, and positions found in the mask."""
    FAMILIES[name].make(tmp_path)
    engine = build(tmp_path)
    rng = np.random.default_rng(3)
    jobs = [
        GenerateJob(draw_ids(rng, n, 600), count, policy=GREEDY, ignore_eos=True)
        for n, count in ((30, 30), (5, 10), (50, 12), (2, 40))
    ]
    alone = [run(engine, job)[0] for job in jobs]
    for one, two in zip(alone, run(engine, *jobs), strict=True):
        assert two.token_ids.tolist() == one.token_ids.tolist()
        assert two.logprobs == pytest.approx(one.logprobs, abs=PER_TOKEN)
