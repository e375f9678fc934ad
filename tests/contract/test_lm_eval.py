"""lm-evaluation-harness on `LogsteerLM`: the same tokens and numbers as on its own `hf` model."""

import json
import random
import subprocess
import sys
from pathlib import Path
from string import Template
from types import SimpleNamespace
from typing import Any

import lm_eval
import pytest
from lm_eval._cli.utils import key_val_to_dict
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

import corpus
from logsteer import Client
from logsteer.errors import LogsteerError
from logsteer.lm_eval import LogsteerLM
from logsteer.lm_eval.model import DEFAULT_BATCH_SIZE, render_chat
from logsteer.schemas import Steering
from logsteer.schemas.openai import TokenizerInfo
from tests.conftest import DEMO_MODEL, SHARED, STORIES_MODEL, Server, needs_shared
from tests.contract.steering import DATA

# The harness, datasets and transformers warn of one another.
pytestmark = pytest.mark.filterwarnings("ignore")

TASKS = Path(__file__).resolve().parents[1] / "eval_tasks"
BLIMP = [
    "local_blimp_anaphor_gender_agreement",
    "local_blimp_determiner_noun_agreement_irregular_1",
    "local_blimp_irregular_plural_subject_verb_agreement_1",
]
ROWS = 200
STEERING = {"vectors": [DATA | {"scale": 1.5}]}
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


def load_hf(path: Path, **settings: Any) -> Any:
    from lm_eval.models.huggingface import HFLM  # loads torch and transformers

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


def test_a_continuation_without_a_token_is_refused(fake_server: Server) -> None:
    """As by `hf`; 0.0 would be the best score of all."""
    model = LogsteerLM(fake_server.url)
    for pair in (("", "<s>"), ("a", "b")):
        with pytest.raises(ValueError, match=f"no token of its own.*target_delimiter.*{pair[1]}"):
            model.loglikelihood([ask("Once", " upon"), ask(*pair)], disable_tqdm=True)
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
    with pytest.raises(TypeError, match="pretrained"):
        LogsteerLM(fake_server.url, pretrained="x")  # type: ignore[call-arg]
    for steering, message in (
        ({}, "vectors is missing"),
        ("{", "no JSON"),
        ({"vectors": [{"name": "nobody"}]}, "nobody"),
    ):
        with pytest.raises(LogsteerError, match=message):
            LogsteerLM(fake_server.url, steering=steering)
    with pytest.raises(FileNotFoundError):
        LogsteerLM(fake_server.url, steering="none.json")
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


@pytest.mark.parametrize("name", ["local-completions", "local-chat-completions"])
def test_the_harness_own_clients_of_openais_shape_are_answered(
    fake_server: Server, name: str
) -> None:
    is_chat = name == "local-chat-completions"
    path = "chat/completions" if is_chat else "completions"
    own = get_model(name)(
        base_url=f"{fake_server.url}/v1/{path}", model="fake", tokenizer_backend=None
        if is_chat else "huggingface", tokenizer=str(DEMO_MODEL), max_retries=1,
    )  # fmt: skip
    chat = own.apply_chat_template([{"role": "user", "content": "Hi"}])
    ending = {"until": ["."], "max_gen_toks": 4, "do_sample": False, "temperature": 0.0}
    (text,) = own.generate_until([ask(chat if is_chat else "Once", ending)], disable_tqdm=True)
    assert isinstance(text, str)
    if not is_chat:
        ((logprob, _),) = own.loglikelihood([ask("Once", " upon a time")], disable_tqdm=True)
        plain = LogsteerLM(fake_server.url, "fake", add_bos_token=False)
        ((wanted, _),) = plain.loglikelihood([ask("Once", " upon a time")], disable_tqdm=True)
        assert logprob == pytest.approx(wanted, abs=1e-4)


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


@pytest.mark.full
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


def test_steering_is_pinned_to_the_content_of_its_vectors(
    fake_client: Client, tmp_path: Path
) -> None:
    pair = {"positive": "good", "negative": "bad"}
    card = fake_client.vectors.train("pinned", [pair]).vector
    given = {"vectors": [{"name": "pinned", "scale": 2.0}], "positions": "completion"}
    path = tmp_path / "steering.json"
    path.write_text(json.dumps(given))
    sources: list[Any] = [given, Steering.model_validate(given), json.dumps(given), path, str(path)]
    for source in sources:
        model = LogsteerLM(fake_client.base_url, steering=source)
        steering = model.get_model_info()["steering"]
        (vector,) = steering["vectors"]
        assert vector["sha256"] == card.sha256 and "name" not in vector
        assert (vector["scale"], steering["positions"]) == (2.0, "completion")
    assert given["vectors"][0]["name"] == sources[1].vectors[0].name == "pinned"  # type: ignore[index]
    assert "steering" not in LogsteerLM(fake_client.base_url).get_model_info()


@pytest.mark.engine
@pytest.mark.parametrize("engine", ["vllm", "tlens"])
def test_a_text_has_one_rolling_log_likelihood(request: pytest.FixtureRequest, engine: str) -> None:
    """That of `hf` without BOS of the tokenizer's: with it the prefix would stand twice.

    EleutherAI/lm-evaluation-harness, issue 3333.
    """
    client: Client = request.getfixturevalue(f"{engine}_client")
    texts = ["Once upon a time there was a little girl named Lily.", "a", ""]
    # Not the same words again: `hf` takes windows that differ in their last token for one.
    texts.append(" ".join(f"Cat {n} sat on {n * 7} mats." for n in range(12)))
    hf = load_hf(DEMO_MODEL, add_bos_token=False, max_length=32)
    wanted = hf.loglikelihood_rolling([ask(text) for text in texts], disable_tqdm=True)
    written = [ask(text) for text in (*texts, f"<s>{texts[0]}", "<s>")]
    documents = [one.args[0] for one in written]
    served = client.perplexity(documents, protocol="rolling", context_length=32)
    for bos in (None, True, False):
        model = LogsteerLM(client.base_url, "demo", max_length=32, add_bos_token=bos)
        found = model.loglikelihood_rolling(written, disable_tqdm=True)
        assert found == pytest.approx([*wanted, wanted[0], 0.0], abs=1e-3)
        assert found == pytest.approx([one.sum_logprob for one in served.results], abs=1e-3)
    assert [one.num_scored for one in served.results][-2:] == [served.results[0].num_scored, 0]
    assert served.results[2].flags == ["nothing_scored"]


@pytest.mark.engine
@pytest.mark.parametrize("engine", ["vllm", "tlens"])
def test_a_steered_model_says_what_the_client_is_told(
    request: pytest.FixtureRequest, engine: str
) -> None:
    client: Client = request.getfixturevalue(f"{engine}_client")
    options: Any = {"max_length": 32, "add_bos_token": False}
    steered = LogsteerLM(client.base_url, "demo", steering=STEERING, **options)
    plain = LogsteerLM(client.base_url, "demo", **options)
    text = corpus.story(random.Random(5), "happy")
    pairs = [("One day, Lily was very", word) for word in (" happy", " sad", " happy and glad.")]
    own: dict[bool, Any] = {}
    for model, steering in ((steered, STEERING), (plain, None)):
        found = model.loglikelihood([ask(*pair) for pair in pairs], disable_tqdm=True)
        items = [{"context": context, "targets": [target]} for context, target in pairs]
        scored = client.logprob(items, steering=steering, bos="never").results
        wanted = [(item.targets[0].logprob, item.targets[0].is_greedy) for item in scored]
        assert found == [(pytest.approx(one, abs=1e-4), greedy) for one, greedy in wanted]

        (rolled,) = model.loglikelihood_rolling([ask(text)], disable_tqdm=True)
        whole = client.perplexity(text, protocol="rolling", context_length=32, steering=steering)
        assert len(client.tokenize(text).results[0].token_ids) > 64
        assert rolled == pytest.approx(whole.total.sum_logprob, abs=1e-3)

        opening, stop = "One day, Lily", "He felt"
        ending: dict[str, Any] = {"until": [stop], "max_gen_toks": 24}
        (written,) = model.generate_until([ask(opening, ending)], disable_tqdm=True)
        nothing = {"vectors": [DATA | {"scale": 0.0}]}
        sampling: Any = {"max_tokens": 24, "temperature": 0.0, "stop": [stop], "bos": "never"}
        answer = client.steer(opening, steering or nothing, **sampling)
        assert written == answer.results[0].completions[0].text.split(stop)[0]
        own[steering is not None] = [logprob for logprob, _ in found], rolled, written
    for with_steering, without in zip(own[True], own[False], strict=True):
        assert with_steering != without


def test_steering_comes_through_the_harness_own_arguments(
    fake_client: Client, tmp_path: Path
) -> None:
    steering = {"vectors": [{"data": {"1": [0.5] * 16}, "scale": 2.0, "op": "ablate"}]}
    path = tmp_path / "steering.json"
    path.write_text(json.dumps(steering))
    for given in (path, json.dumps(steering)):
        arguments = key_val_to_dict(f"base_url={fake_client.base_url},steering={given},model=fake")
        model = LogsteerLM.create_from_arg_obj(arguments)
        (vector,) = model.get_model_info()["steering"]["vectors"]
        assert (vector["data"], vector["op"]) == ({"1": [0.5] * 16}, "ablate")


def evaluate(model: Any, tasks: list[str], scratch: Path, arguments: Any = None) -> dict[str, Any]:
    """The harness's results; a model may be a name of its own."""
    manager = TaskManager(include_path=str(scratch), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=tasks,
        task_manager=manager,
        limit=ROWS,
        bootstrap_iters=0,
    )
    assert results is not None
    return results


def list_logprobs(results: dict[str, Any], task: str) -> list[float]:
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    flat = [response for sample in samples for response in sample["filtered_resps"]]
    return [value[0] if isinstance(value, tuple | list) else value for value in flat]


@pytest.fixture(scope="module")
def stories_hf() -> Any:
    return load_hf(STORIES_MODEL)


def compare(
    hf: Any, server: Server, tasks: list[str], scratch: Path, tolerance: float = 1e-3
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures of both per task, once every document's log-likelihood is the same."""
    theirs = evaluate(hf, tasks, scratch)
    ours = evaluate(LogsteerLM(server.url, "stories"), tasks, scratch)
    for task in tasks:
        own, reference = list_logprobs(ours, task), list_logprobs(theirs, task)
        assert len(own) == len(reference) > 1
        worst = max(abs(a - b) for a, b in zip(own, reference, strict=True))
        assert worst < tolerance
    return ours["results"], theirs["results"]


@pytest.mark.engine
@pytest.mark.parametrize("client", ["vllm", "tlens"], indirect=True)
def test_local_completions_says_what_the_adapter_says(client: Client, scratch: Path) -> None:
    """The harness as it comes, with the arguments of its own documentation."""
    url = client.base_url
    pages = [corpus.story(random.Random(seed), "sad") for seed in range(3)]
    rows = "".join(json.dumps({"page": page}) + "\n" for page in pages)
    (scratch / "wikitext.jsonl").write_text(rows)
    tasks = ["local_endings", "local_wikitext"]
    arguments = {
        "model": "demo", "base_url": f"{url}/v1/completions", "num_concurrent": 4,
        "max_length": 66,  # room for what it generates, and for a token in front of a window
    }  # fmt: skip
    if len(client.models().models) > 1:  # it asks for a tokenizer without naming the model
        arguments |= {"tokenizer": str(DEMO_MODEL), "tokenizer_backend": "huggingface"}
    found = evaluate("local-completions", tasks, scratch, arguments)
    adapter = LogsteerLM(url, "demo", max_length=64, add_bos_token=False)
    wanted = evaluate(adapter, tasks, scratch)
    for task, documents in zip(tasks, (8, 3), strict=True):
        own, reference = list_logprobs(found, task), list_logprobs(wanted, task)
        assert len(own) == len(reference) >= documents
        assert own == pytest.approx(reference, abs=1e-3)
        assert len(set(own)) > 1
        for name, figure in wanted["results"][task].items():
            if isinstance(figure, float):
                assert found["results"][task][name] == pytest.approx(figure, rel=1e-4)


@needs_shared
@pytest.mark.engine
def test_blimp_is_what_hf_says(vllm_server: Server, stories_hf: Any, scratch: Path) -> None:
    ours, theirs = compare(stories_hf, vllm_server, BLIMP, scratch)
    for task in BLIMP:
        assert ours[task]["acc,none"] == theirs[task]["acc,none"]


@needs_shared
@pytest.mark.engine
def test_wikitext_is_what_hf_says(vllm_server: Server, scratch: Path) -> None:
    text = (SHARED / "data" / "wikitext2-valid.txt").read_text()[:60_000]
    pages = [text[start : start + 9_000] for start in range(0, len(text), 9_000)]
    rows = "".join(json.dumps({"page": page}) + "\n" for page in [*pages, "A short page."])
    (scratch / "wikitext.jsonl").write_text(rows)
    # A document is some 5,500 tokens and 30,000 nats, which hf adds up in float32.
    hf = load_hf(STORIES_MODEL, add_bos_token=False)  # or BOS would stand twice
    ours, theirs = compare(hf, vllm_server, ["local_wikitext"], scratch, tolerance=1e-2)
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


@needs_shared
@pytest.mark.engine
def test_greedy_generation_is_what_hf_says(vllm_server: Server, stories_hf: Any) -> None:
    model = LogsteerLM(vllm_server.url, "stories")
    short: dict[str, Any] = {"until": ["."], "max_gen_toks": 40}
    long: dict[str, Any] = {"until": ["\n\n"], "max_gen_toks": 30, "do_sample": False}
    beginnings = ["Once upon a time", "Lily and Tom", "The little dog was", "One day, a big bear"]
    requests = [ask(text, dict(kind)) for text in beginnings for kind in (short, long)]
    own = model.generate_until(requests, disable_tqdm=True)
    # hf decodes the completion alone, and so loses the space before its first word.
    reference = stories_hf.generate_until(requests, disable_tqdm=True)
    assert [text.lstrip() for text in own] == [text.lstrip() for text in reference]
