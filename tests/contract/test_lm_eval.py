"""lm-evaluation-harness on `LogsteerLM`: the same tokens and numbers as on its own `hf` model."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from string import Template
from types import SimpleNamespace
from typing import Any

import lm_eval
import pytest
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from logsteer._chat import render_chat
from logsteer.errors import LogsteerError
from logsteer.lm_eval import DEFAULT_BATCH_SIZE, LogsteerLM
from logsteer.schemas.openai import TokenizerInfo
from tests.conftest import DEMO_MODEL, SHARED, STORIES_MODEL, Server, needs_shared

# The harness, datasets and transformers warn of one another.
pytestmark = pytest.mark.filterwarnings("ignore")

TASKS = Path(__file__).resolve().parents[1] / "eval_tasks"
BLIMP = [
    "local_blimp_anaphor_gender_agreement",
    "local_blimp_determiner_noun_agreement_irregular_1",
    "local_blimp_irregular_plural_subject_verb_agreement_1",
]
ROWS = 200
PAIRS = [
    ("", "The cat sat on the mat."),
    ("", " leading space"),
    ("", "<s>"),
    ("", "<s>Once upon a time"),
    ("Once upon a time", " there was a cat."),
    ("Once upon a time ", "there was a cat."),
    ("Once upon a time \n ", " there was a cat."),
    ("Once upon a ti", "me there was"),
    ("<s>Once upon a time", " there was"),
    ("   ", "only space before"),
    ("Füße 😀", " 日本語"),
    ("one", " two"),
    ("one", " three"),
    ("one", " two"),
]


def ask(*arguments: Any) -> SimpleNamespace:
    """A request as the harness passes it on."""
    return SimpleNamespace(args=arguments)


def load_hf(path: Path, **settings: Any) -> HFLM:
    return HFLM(pretrained=str(path), device="cpu", dtype="float32", batch_size=64, **settings)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tasks, which read ../shared and the files that are written here."""
    directory = tmp_path_factory.mktemp("tasks")
    for file in TASKS.glob("*.yaml"):
        text = Template(file.read_text()).substitute(DATA=SHARED / "data", SCRATCH=directory)
        (directory / file.name).write_text(text)
    endings = [{"beginning": f"{n} and 1 are", "right": str(n + 1), "wrong": "0"} for n in range(8)]
    (directory / "endings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in endings))
    return directory


@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_text_is_cut_into_the_tokens_of_hf(
    fake_server: Server, monkeypatch: pytest.MonkeyPatch, add_bos_token: bool | None
) -> None:
    hf = load_hf(DEMO_MODEL, add_bos_token=add_bos_token)
    seen: list[Any] = []
    monkeypatch.setattr(hf, "_loglikelihood_tokens", lambda requests, **_: seen.extend(requests))
    hf.loglikelihood([ask(*pair) for pair in PAIRS], disable_tqdm=True)
    model = LogsteerLM(fake_server.url, add_bos_token=add_bos_token)
    assert model._encode_pairs(PAIRS) == seen
    assert model.prefix_token_id == hf.prefix_token_id
    assert model.eot_token_id == hf.eot_token_id
    for text, _ in PAIRS:
        assert model.tok_encode(text) == hf.tok_encode(text)
        assert model.tok_encode(text, add_special_tokens=False) == hf.tok_encode(
            text, add_special_tokens=False
        )


def test_answers_keep_the_order_of_requests_and_go_into_the_cache(fake_server: Server) -> None:
    requests = [ask(*pair) for pair in PAIRS if pair != ("", "<s>")]
    model = LogsteerLM(fake_server.url, batch_size=3)
    kept: dict[Any, Any] = {}
    model.cache_hook = SimpleNamespace(
        add_partial=lambda kind, pair, score: kept.update({pair: score})
    )
    together = model.loglikelihood(requests, disable_tqdm=True)
    alone = [model.loglikelihood([request], disable_tqdm=True)[0] for request in requests]
    assert together == [(pytest.approx(logprob), greedy) for logprob, greedy in alone]
    assert kept == {request.args: score for request, score in zip(requests, alone, strict=True)}


def test_a_continuation_without_a_token_is_certain(fake_server: Server) -> None:
    model = LogsteerLM(fake_server.url)
    assert model.loglikelihood([ask("", "<s>")], disable_tqdm=True) == [(0.0, True)]
    assert model.loglikelihood([], disable_tqdm=True) == []
    assert model.loglikelihood_rolling([], disable_tqdm=True) == []


def test_what_cannot_be_done_is_refused_and_says_what_to_do(fake_server: Server) -> None:
    model = LogsteerLM(fake_server.url, max_length=16)
    with pytest.raises(ValueError, match="the model reads 16 at once"):
        model.loglikelihood([ask("a", " b c d" * 20)], disable_tqdm=True)
    with pytest.raises(ValueError, match="lower max_gen_toks"):
        model.generate_until([ask("a", {"max_gen_toks": 16})], disable_tqdm=True)
    with pytest.raises(ValueError, match="batch_size"):
        LogsteerLM(fake_server.url, batch_size="many")
    with pytest.raises(ValueError, match="max_length"):
        LogsteerLM(fake_server.url, max_length=10**6)
    with pytest.raises(LogsteerError, match="nothing"):
        LogsteerLM(fake_server.url, "nothing")
    with pytest.raises(TypeError, match="steering"):
        LogsteerLM(fake_server.url, steering={})  # type: ignore[call-arg]
    assert LogsteerLM(fake_server.url, batch_size=1).batch_size == DEFAULT_BATCH_SIZE


def test_chats_are_rendered_as_by_hf(fake_server: Server) -> None:
    hf, model = load_hf(DEMO_MODEL), LogsteerLM(fake_server.url)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi there"}]
    answered = [*turns, {"role": "assistant", "content": "Hello, "}]
    assert model.apply_chat_template(turns) == hf.apply_chat_template(turns)
    assert model.apply_chat_template(answered, False) == hf.apply_chat_template(answered, False)
    text = model.apply_chat_template(turns)
    assert model.tok_encode(text) == hf.tok_encode(text)
    assert model.chat_template(True) == hf.chat_template(True)
    assert model.tokenizer_name.startswith("sha256:")


def test_a_model_without_a_chat_template_says_so() -> None:
    info = TokenizerInfo(
        tokenizer_class="T",
        bos_token=None,
        eos_token=None,
        pad_token=None,
        chat_template=None,
        model_max_length=8,
    )
    with pytest.raises(LogsteerError, match="leave --apply_chat_template out"):
        render_chat(info, [{"role": "user", "content": "Hi"}], True)
    refusing = info.model_copy(update={"chat_template": "{{ raise_exception('no system') }}"})
    with pytest.raises(LogsteerError, match="no system"):
        render_chat(refusing, [{"role": "user", "content": "Hi"}], True)


def test_the_command_prints_the_table(fake_server: Server, scratch: Path) -> None:
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("logsteer-eval")),
            *(
                "run",
                "--model",
                "logsteer",
                "--model_args",
                f"base_url={fake_server.url},model=fake",
            ),
            *("--tasks", "local_endings", "--include_path", str(scratch), "--limit", "4"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("|local_endings")]
    assert rows, done.stdout
    assert "|acc " in rows[0]


def evaluate(model: Any, tasks: list[str], scratch: Path) -> tuple[dict[str, Any], float]:
    """The harness's results, and the seconds that they took."""
    manager = TaskManager(include_path=str(scratch), include_defaults=False)
    start = time.perf_counter()
    results = lm_eval.simple_evaluate(
        model=model, tasks=tasks, task_manager=manager, limit=ROWS, bootstrap_iters=0
    )
    assert results is not None
    return results, time.perf_counter() - start


def list_logprobs(results: dict[str, Any], task: str) -> list[float]:
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    flat = [response for sample in samples for response in sample["filtered_resps"]]
    return [value[0] if isinstance(value, tuple | list) else value for value in flat]


@pytest.fixture(scope="module")
def stories_hf() -> HFLM:
    return load_hf(STORIES_MODEL)


def compare(
    hf: HFLM, server: Server, tasks: list[str], scratch: Path, tolerance: float = 1e-3
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures of both per task, once every document's log-likelihood is the same."""
    theirs, hf_time = evaluate(hf, tasks, scratch)
    ours, own_time = evaluate(LogsteerLM(server.url, "stories"), tasks, scratch)
    for task in tasks:
        own, reference = list_logprobs(ours, task), list_logprobs(theirs, task)
        assert len(own) == len(reference) > 1
        worst = max(abs(a - b) for a, b in zip(own, reference, strict=True))
        figures = {k: v for k, v in ours["results"][task].items() if isinstance(v, float)}
        print(f"{task}: {figures}, largest difference from hf {worst:.2e} nats a document")
        assert worst < tolerance
    print(f"seconds: hf in-process {hf_time:.1f}, logsteer over HTTP {own_time:.1f}")
    return ours["results"], theirs["results"]


@needs_shared
@pytest.mark.engine
def test_blimp_is_what_hf_says(vllm_server: Server, stories_hf: HFLM, scratch: Path) -> None:
    ours, theirs = compare(stories_hf, vllm_server, BLIMP, scratch)
    for task in BLIMP:
        assert ours[task]["acc,none"] == theirs[task]["acc,none"]


@needs_shared
@pytest.mark.engine
def test_lambada_is_what_hf_says(vllm_server: Server, stories_hf: HFLM, scratch: Path) -> None:
    ours, theirs = compare(stories_hf, vllm_server, ["local_lambada"], scratch)
    own, reference = ours["local_lambada"], theirs["local_lambada"]
    assert own["acc,none"] == reference["acc,none"]
    assert own["perplexity,none"] == pytest.approx(reference["perplexity,none"], rel=1e-4)


@needs_shared
@pytest.mark.engine
def test_wikitext_is_what_hf_says(vllm_server: Server, stories_hf: HFLM, scratch: Path) -> None:
    text = (SHARED / "data" / "wikitext2-valid.txt").read_text()[:60_000]
    pages = [text[start : start + 9_000] for start in range(0, len(text), 9_000)]
    rows = "".join(json.dumps({"page": page}) + "\n" for page in [*pages, "A short page."])
    (scratch / "wikitext.jsonl").write_text(rows)
    # A document is some 5,500 tokens and 30,000 nats, which hf adds up in float32.
    ours, theirs = compare(stories_hf, vllm_server, ["local_wikitext"], scratch, tolerance=1e-2)
    for name in ("word_perplexity,none", "byte_perplexity,none", "bits_per_byte,none"):
        own, reference = ours["local_wikitext"][name], theirs["local_wikitext"][name]
        assert own == pytest.approx(reference, rel=1e-4)


@needs_shared
@pytest.mark.engine
def test_long_contexts_are_cut_as_hf_cuts_them(vllm_server: Server) -> None:
    hf = load_hf(STORIES_MODEL, max_length=32)
    model = LogsteerLM(vllm_server.url, "stories", max_length=32)
    story = "Once upon a time there was a little cat who lived in a big house. " * 3
    cuts = [story[:length] for length in (1, 40, 60, 64, 66, 70, 150)]
    requests = [ask(cut, target) for cut in cuts for target in (" cat", " The cat was happy and")]
    own = model.loglikelihood(requests, disable_tqdm=True)
    reference = hf.loglikelihood(requests, disable_tqdm=True)
    assert own == [(pytest.approx(logprob, abs=1e-4), greedy) for logprob, greedy in reference]
    rolled = model.loglikelihood_rolling([ask(story)], disable_tqdm=True)
    assert rolled == pytest.approx(hf.loglikelihood_rolling([ask(story)], disable_tqdm=True))
    assert all(math.isfinite(value) for value in rolled)


@needs_shared
@pytest.mark.engine
def test_greedy_generation_is_what_hf_says(vllm_server: Server, stories_hf: HFLM) -> None:
    model = LogsteerLM(vllm_server.url, "stories")
    short: dict[str, Any] = {"until": ["."], "max_gen_toks": 40}
    long: dict[str, Any] = {"until": ["\n\n"], "max_gen_toks": 30, "do_sample": False}
    beginnings = ["Once upon a time", "Lily and Tom", "The little dog was", "One day, a big bear"]
    requests = [ask(text, dict(kind)) for text in beginnings for kind in (short, long)]
    own = model.generate_until(requests, disable_tqdm=True)
    # hf decodes the completion alone, and so loses the space before its first word.
    reference = stories_hf.generate_until(requests, disable_tqdm=True)
    assert [text.lstrip() for text in own] == [text.lstrip() for text in reference]
    print(own[0])
