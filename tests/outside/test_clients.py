"""Clients of OpenAI's and vLLM's APIs, as they are published, on the demo model of a real server.

Each runs a script of `clients` in an environment of its own; its text is held against ours.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from logsteer import Client
from tests.conftest import DEMO_MODEL, ROOT, Server

pytestmark = [pytest.mark.engine, pytest.mark.full]

SCRIPTS = Path(__file__).with_name("clients")
PROMPT = "Once upon a time"
GREEDY: Any = {"max_tokens": 8, "temperature": 0.0}


def run(*command: Any, cwd: Path | None = None) -> str:
    """Return what a command prints; it fails the test where the command fails."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def install(directory: Path, *command: Any) -> None:
    """Run an installer, or skip the test where that is absent or finds no package."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"SKIPPED BECAUSE {command[0]} IS NOT INSTALLED")
    done = subprocess.run([str(part) for part in command], cwd=directory, check=False)
    if done.returncode:
        pytest.skip(f"SKIPPED BECAUSE THE REGISTRY LACKS IT: {' '.join(map(str, command))}")


def make_environment(directory: Path, *packages: str, with_ours: bool = False) -> Path:
    """Return the interpreter of a new environment; ours lends it torch and vLLM where asked."""
    run(sys.executable, "-m", "venv", directory)
    python = directory / "bin" / "python"
    if with_ours:
        ours = next(path for path in sys.path if path.endswith("site-packages"))
        (found,) = directory.glob("lib/python*/site-packages")
        (found / "ours.pth").write_text(f"{ours}\n")
    install(directory, python, "-m", "pip", "install", "-q", *packages)
    return python


@pytest.fixture(scope="module")
def client(demo_server: Server) -> Any:
    with Client(demo_server.url, model="demo", max_retries=0, timeout=300) as found:
        yield found


def ask_ours(client: Client) -> tuple[Any, Any]:
    """The completions of the prompt, and of the conversation that it begins, by our own client."""
    text = client.generate(PROMPT, **GREEDY)
    chat = client.generate(messages=[{"role": "user", "content": PROMPT}], **GREEDY)
    return text.results[0].completions[0], chat.results[0].completions[0]


@pytest.mark.parametrize("name", ["openai", "openai.mjs", "litellm", "inspect"])
def test_a_client_says_what_ours_says(client: Client, tmp_path: Path, name: str) -> None:
    arguments = client.base_url, "demo", PROMPT
    if name == "openai.mjs":
        install(tmp_path, "npm", "install", "--silent", "openai")
        script = tmp_path / "ask_openai.mjs"  # beside the package, where node looks for it
        script.write_text((SCRIPTS / script.name).read_text())
        output = run("node", script, *arguments)
    else:
        packages = ("inspect-ai", "openai") if name == "inspect" else (name,)
        python = make_environment(tmp_path, *packages)
        output = run(python, SCRIPTS / f"ask_{name}.py", *arguments, cwd=tmp_path)
    found = json.loads(output.splitlines()[-1])
    text, chat = ask_ours(client)
    assert found.pop("chat") == chat.text
    if name == "inspect":
        assert found["score"] == "I"
        assert found["chat_logprobs"] == pytest.approx(chat.logprobs, abs=1e-4)
    else:
        assert (found["completion"], found["streamed"]) == (text.text, chat.text)
        assert found["logprobs"] == pytest.approx(text.logprobs, abs=1e-4)


def test_trl_generates_chats_and_scores(client: Client, tmp_path: Path) -> None:
    python = make_environment(tmp_path, "trl==1.16.0", with_ours=True)
    output = run(python, SCRIPTS / "ask_trl.py", client.base_url, "demo", PROMPT)
    found = json.loads(output.splitlines()[-1])
    for kind, own in zip(("generated", "chatted"), ask_ours(client), strict=True):
        assert found[kind]["completion_ids"] == [own.token_ids]
        drawn = [one[0] for one in found[kind]["logprobs"][0]]
        assert drawn == pytest.approx(own.logprobs, abs=1e-4)
    text, _ = ask_ours(client)
    (scored,) = found["scored"]["actual_logprobs"]
    assert [one for (one,) in scored] == pytest.approx(text.logprobs, abs=1e-4)
    assert {len(one) for one in found["scored"]["logprobs"][0]} == {5}


def test_trl_trains_a_student_on_the_teachers_numbers(client: Client, tmp_path: Path) -> None:
    """Its loss falls, and inside the trainer they are transformers' at its temperature."""
    python = make_environment(tmp_path, "trl==1.16.0", with_ours=True)
    script = SCRIPTS / "ask_distillation.py"
    output = run(python, script, client.base_url, DEMO_MODEL, tmp_path)
    found = json.loads(output.splitlines()[-1])
    print(f"losses {found['losses']}, {found['largest']:.1e} nats from transformers")
    first, last = (sum(part) / 4 for part in (found["losses"][:4], found["losses"][-4:]))
    assert last < 0.7 * first
    assert found["largest"] < 1e-4


@pytest.mark.parametrize(
    ("backend", "path"),
    [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")],
)
def test_vllm_bench_serve_fails_no_request(
    client: Client, tmp_path: Path, backend: str, path: str
) -> None:
    output = run(
        sys.executable, SCRIPTS / "ask_bench.py", "--backend", backend, "--endpoint", path,
        "--base-url", client.base_url, "--model", "demo", "--tokenizer", DEMO_MODEL,
        "--dataset-name", "random", "--random-input-len", 16, "--random-output-len", 8,
        "--num-prompts", 8, "--ignore-eos", "--repetition-penalty", 1.0, "--disable-tqdm",
        "--save-result", "--save-detailed", "--result-dir", tmp_path,
        "--result-filename", "found.json",
    )  # fmt: skip
    assert "/tokenize unavailable" not in output
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["completed"], found["failed"]) == (8, 0)
    assert found["output_lens"] == [8] * 8
    assert all(found["generated_texts"])


def test_guidellm_fails_no_request(client: Client, tmp_path: Path) -> None:
    python = make_environment(tmp_path, "guidellm", with_ours=True)
    run(
        python.with_name("guidellm"), "run", "--disable-console",
        "--backend", f"kind=openai_http,target={client.base_url},model=demo",
        "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4",
        "--tokenizer", f"kind=hf_auto,model={DEMO_MODEL}",
        "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "--output", "kind=json,path=found.json", cwd=tmp_path,
    )  # fmt: skip
    (found,) = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
    assert not found["requests"]["errored"]
    counts = [one["output_metrics"]["text_tokens"] for one in found["requests"]["successful"]]
    assert counts == [8] * 4


def test_promptfoo_evaluates_both_endpoints(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, chat = ask_ours(client)
    base = {"apiBaseUrl": f"{client.base_url}/v1", "apiKey": "none"} | GREEDY
    wanted = {"openai:completion:demo": text.text, "openai:chat:demo": chat.text}
    (tmp_path / "ask.json").write_text(json.dumps({
        "prompts": ["{{prompt}}"],
        "providers": [{"id": name, "config": base} for name in wanted],
        "tests": [{"vars": {"prompt": PROMPT}}],
    }))  # fmt: skip
    for name in ("DISABLE_TELEMETRY", "DISABLE_UPDATE"):
        monkeypatch.setenv(f"PROMPTFOO_{name}", "1")
    monkeypatch.setenv("PROMPTFOO_CONFIG_DIR", str(tmp_path / "home"))
    # Most of its optional packages are other vendors' clients and a browser; its store is one.
    npm = "npm", "install", "--silent", "--omit=optional"
    install(tmp_path, *npm, "promptfoo")
    store = json.loads((tmp_path / "node_modules/libsql/package.json").read_text())["version"]
    install(tmp_path, *npm, f"@libsql/linux-x64-gnu@{store}")
    command = "node_modules/.bin/promptfoo", "eval", "-c", "ask.json", "--no-cache", "-o", "o.json"
    run(*command, cwd=tmp_path)
    rows = json.loads((tmp_path / "o.json").read_text())["results"]["results"]
    assert {row["provider"]["id"]: row["response"]["output"] for row in rows} == wanted


def test_saelens_trains_on_captured_activations(client: Client, tmp_path: Path) -> None:
    """SAELens' own trainer, on the demo model's layer 2; a feature of what it writes steers."""
    lines = (ROOT / "demo" / "corpus.py").read_text().splitlines() * 8
    rows = [line for line in lines if len(line) > 20]
    index = client.capture(rows, "sae-lens", [2], progress=False, overwrite=True)
    python = make_environment(tmp_path, "sae-lens", with_ours=True)
    script = SCRIPTS / "train_sae.py"
    given = client.base_url, "sae-lens", tmp_path, 4 * index.rows, 256
    output = run("env", f"PYTHONPATH={ROOT / 'client'}", python, script, *given, cwd=tmp_path)
    losses = [loss for _, loss in json.loads(output.splitlines()[-1])["losses"]]
    assert losses[-1] < 0.5 * losses[0], losses
    card = client.saes.put("trained", tmp_path / "sae", overwrite=True)
    assert (card.hook, card.layer, card.features, card.k) == ("resid_post", 2, 256, 16)
    features = client.activations([PROMPT], sae="trained", top=1)
    feature = int(features[0].feature_ids[-1, 0])
    plain, steered = (
        client.logprob([{"context": PROMPT, "targets": [" there"]}], steering=steering)
        for steering in (None, f"trained/{feature}:8")
    )
    change = steered.results[0].targets[0].logprob - plain.results[0].targets[0].logprob
    assert abs(change) > 1e-3
