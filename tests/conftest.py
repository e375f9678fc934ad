"""What all tests share: small models, and servers that are started once, as a user would."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import certifi
import httpx
import hypothesis
import pytest
import yaml
from xdist.scheduler import LoadFileScheduling

# Before anything loads torch: threads that spin while they wait take the cores from all others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from logsteer import Client
from logsteer_server.engines.vllm.arguments import is_cpu_build
from logsteer_server.imports import import_tokenizers
from tests.servers import Configuration, Server, SharedServers, Starter, stop_all
from tests.trained import convert_smollm2, find_gguf

ROOT = Path(__file__).resolve().parents[1]
DEMO_MODEL = ROOT / "demo" / "model"
SHARED = ROOT.parent / "shared"
STORIES_MODEL = SHARED / "models" / "stories260k"
QUANTIZED = {"w8a8": "float32", "fp8": "float32", "w4a16": "float16", "awq": "float16"}
"""Schemes of `demo/quantize.py`, and what each is served in: vLLM has no float32 for 4 bits."""
VOCAB_SIZE = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]

# The same examples in each run, unless EXAMPLES=new asks for others: a failure tells of a change.
hypothesis.settings.register_profile(
    "shared-machine", deadline=None, derandomize=os.environ.get("EXAMPLES") != "new"
)
hypothesis.settings.load_profile("shared-machine")

needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(),
    reason="SKIPPED BECAUSE ../shared IS ABSENT: its models and data are needed",
)

ServerFactory = Callable[..., Server]


@pytest.fixture(scope="module", autouse=True)
def _garbage() -> Iterator[None]:
    """Have a file that leaves a socket or a file open fail itself, not whichever runs later."""
    yield
    gc.collect()


@pytest.fixture
def anyio_backend() -> str:
    """What async tests run on: asyncio, though trio be installed."""
    return "asyncio"


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerFactory]:
    """Starts servers that end with the file: `start_server(config, **environment)`."""
    servers: list[Server] = []

    def start(config: Configuration, **environment: str) -> Server:
        servers.append(Server.start(config, tmp_path_factory.mktemp("server"), **environment))
        servers[-1].wait_until_ready()
        return servers[-1]

    yield start
    stop_all(servers)


HOOKS = ["resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"]
"""What vLLM can steer and read of a layer."""


def fake_model(model_id: str = "fake", **engine_args: Any) -> Configuration:
    """Configuration of a fake model with the demo model's tokenizer."""
    return {
        "id": model_id,
        "engine": "fake",
        "path": str(DEMO_MODEL),
        "engine_args": {"vocab_size": VOCAB_SIZE, **engine_args},
    }


def vllm_model(model_id: str, path: Path = DEMO_MODEL, **settings: Any) -> Configuration:
    """Configuration of a small model on vLLM, by the runner that the environment names."""
    runner = os.environ.get("LOGSTEER_TEST_RUNNER", "auto")
    if runner == "v2" and is_cpu_build():  # it is interpreted there, and takes no compiled model
        settings["compile"] = False
    defaults = {"memory": "256MiB", "compile": False, "runner": runner}
    return {"id": model_id, "engine": "vllm", "path": str(path)} | defaults | settings


def tlens_model(model_id: str, path: Path = DEMO_MODEL, **settings: Any) -> Configuration:
    """Configuration of a small model on TransformerLens, on the CPU unless the check says where.

    Where vLLM runs is settled by its build.
    """
    devices = os.environ.get("LOGSTEER_TEST_DEVICES", "cpu")
    defaults = {"dtype": "float32", "devices": devices}
    return {"id": model_id, "engine": "transformer_lens", "path": str(path)} | defaults | settings


# ------------------------------------------------------------------ servers with real engines


def uncached(*models: Configuration, **settings: Any) -> Configuration:
    """A server without a result cache, so that whatever is compared was computed twice."""
    return {"models": list(models), "cache_bytes": 0} | settings


def configure_vllm(directory: Path) -> Configuration:
    """`demo`, and `stories` where ../shared has it."""
    models = [vllm_model("demo")]
    if STORIES_MODEL.is_dir():
        models.append(vllm_model("stories", STORIES_MODEL))
    return uncached(*models)


def configure_demo(directory: Path) -> Configuration:
    """The demo model alone, as `make serve` starts it."""
    (model,) = yaml.safe_load((ROOT / "demo" / "models.yaml").read_text())["models"]
    return {"models": [vllm_model("demo") | model | {"path": str(DEMO_MODEL)}]}


def configure_quantized(directory: Path) -> Configuration:
    """The demo model in every scheme of its script, beside `demo`."""
    command = [sys.executable, str(ROOT / "demo" / "quantize.py"), *QUANTIZED]
    subprocess.run([*command, "--output", str(directory)], check=True, capture_output=True)
    models = [
        vllm_model(scheme, directory / scheme, dtype=dtype) for scheme, dtype in QUANTIZED.items()
    ]
    return uncached(vllm_model("demo"), *models)


def configure_precision(directory: Path) -> Configuration:
    """Models whose head is computed in float32 and whose body is not, and models of one dtype."""
    half = {"dtype": "bfloat16"}
    return uncached(
        vllm_model("vllm", **half),
        tlens_model("tlens", **half),
        tlens_model("double", dtype="float64"),
    )


def configure_chat(directory: Path) -> Configuration:
    """The demo model on both engines, with a template that takes tools and ends in newlines.

    It is one of two, which have names.
    """
    checkpoint = directory / "demo-newlines"
    shutil.copytree(DEMO_MODEL, checkpoint)
    shutil.copy(Path(__file__).with_name("chat_template.jinja"), checkpoint)
    (checkpoint / "additional_chat_templates").mkdir()
    (checkpoint / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    models = vllm_model("vllm", checkpoint), tlens_model("tlens", checkpoint)
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    variants = [{"name": f"quiet-{model['id']}", "model": model["id"]} | quiet for model in models]
    return uncached(*models, variants=variants, trust_request_chat_template=True)


def configure_longrope(directory: Path) -> Configuration:
    """A tiny Phi-3 with random weights, on both engines; its factors change after 64 tokens."""
    import torch
    from transformers import Phi3Config, Phi3ForCausalLM

    checkpoint = directory / "phi3"
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
        original_max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        initializer_range=0.1, rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0,
            "short_factor": [1 + 0.02 * i for i in range(16)],
            "long_factor": [1 + 0.5 * i for i in range(16)],
        },
    )  # fmt: skip
    Phi3ForCausalLM(config).save_pretrained(checkpoint)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, checkpoint)
    return uncached(vllm_model("vllm", checkpoint), tlens_model("tlens", checkpoint))


def configure_byte_level(directory: Path) -> Configuration:
    """A tiny Llama with random weights, on both engines; its tokens are bytes and common words.

    Its configuration names a class of tokenizers for another kind of vocabulary.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    import_tokenizers()  # a test may import transformers at the same time
    from transformers import LlamaConfig, LlamaForCausalLM

    signs = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = signs, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=signs.alphabet()
    )
    tokenizer.train_from_iterator([(ROOT / "README.md").read_text()], trainer)
    checkpoint = directory / "byte-level"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128,
        bos_token_id=0, eos_token_id=1, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(checkpoint)
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    named = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    template = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(named | template))
    return uncached(vllm_model("vllm", checkpoint), tlens_model("tlens", checkpoint))


CONFIGURATIONS: dict[str, Callable[[Path], Configuration]] = {
    # What the page is looked at with: the demo model, and one that is compared with it.
    "playground": lambda _: {"models": [vllm_model("demo"), fake_model("other")]},
    "vllm": configure_vllm,
    # vLLM with a compiled model, and with one that is never steered.
    "compiled": lambda _: uncached(
        vllm_model("compiled", compile=True), vllm_model("unsteered", steering_slots=0)
    ),
    # Room for all adapters of test_adapters.py.
    "tlens": lambda _: uncached(tlens_model("demo"), max_upload_bytes=2**22),
    "demo": configure_demo,
    "quantized": configure_quantized,
    "precision": configure_precision,
    "chat": configure_chat,
    "longrope": configure_longrope,
    "byte_level": configure_byte_level,
    # Both engines side by side, to be held against each other, and one in half precision.
    "parity": lambda _: uncached(
        vllm_model("vllm", hooks=HOOKS, compile=True),
        tlens_model("tlens"),
        tlens_model("half", dtype="bfloat16"),
    ),
    "tensor_parallel": lambda _: uncached(vllm_model("two", tensor_parallel=2, hooks=HOOKS)),
    "pipeline_parallel": lambda _: uncached(vllm_model("two", pipeline_parallel=2, hooks=HOOKS)),
    # A trained model on both engines: on one from the GGUF file, on one as a checkpoint.
    "real": lambda _: uncached(
        vllm_model("vllm", convert_smollm2(), hooks=HOOKS, memory="512MiB"),
        tlens_model("tlens", find_gguf() or Path()),
    ),
    # Room for all adapters of its tests, and on vLLM for two of them at once.
    "vllm_adapters": lambda _: uncached(
        vllm_model("demo", adapter_slots=2, adapter_rank=8), max_upload_bytes=2**22
    ),
    # With a result cache, which the others have not, and little room for what is sent.
    "tlens_limited": lambda _: {
        "models": [tlens_model("demo")],
        "max_upload_bytes": 2**22,
    },
}
"""Servers by name, for all files that name their fixture, such as `vllm_server`.

In this order files that need the same ones run one after another, and their servers end with them.
"""

SERVERS = pytest.StashKey[SharedServers]()
STARTER = pytest.StashKey[Starter]()


def pytest_configure(config: pytest.Config) -> None:
    """Have a directory for the shared servers: an own one, or in a worker the controller's."""
    # A shell's background job ignores interrupts, and what tests start and interrupt would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if directory := getattr(config, "workerinput", {}).get("servers"):
        config.stash[SERVERS] = SharedServers(Path(directory))
        return
    own = Path(tempfile.mkdtemp(prefix="logsteer-tests-"))
    shorten_certificates(own / "certificate.pem")
    config.stash[SERVERS] = SharedServers(own)
    config.stash[STARTER] = Starter(own, CONFIGURATIONS)


def shorten_certificates(path: Path) -> None:
    """Have HTTP clients know one authority: to read all of them takes 20 ms a client."""
    end = "-----END CERTIFICATE-----\n"
    path.write_text(certifi.contents().partition(end)[0] + end)
    os.environ["SSL_CERT_FILE"] = str(path)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist where the shared servers are."""
    node.workerinput["servers"] = str(node.config.stash[SERVERS].directory)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the shared servers where this process started them."""
    if starter := config.stash.get(STARTER, None):
        starter.close()
        shutil.rmtree(config.stash[SERVERS].directory)


class ByFile(LoadFileScheduling):
    """Gives a worker one file after another; tests/cluster counts as one: its files share a Ray."""

    def _split_scope(self, nodeid: str) -> str:
        own = "tests/cluster"
        return own if nodeid.startswith(f"{own}/") else str(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """Have the tests of a file run in one worker."""
    return ByFile(config, log)


def list_servers(item: pytest.Item) -> list[str]:
    """The shared servers of a test: by a fixture, or by a parameter that chooses one."""
    fixtures = getattr(item, "fixturenames", ())
    parameters = (getattr(item, "callspec", None) and item.callspec.params) or {}
    chosen = {parameters.get("client"), parameters.get("split")}
    return [name for name in CONFIGURATIONS if f"{name}_server" in fixtures or name in chosen]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import a file of which every test needs an engine, where none is wanted."""
    if not config.option.markexpr.startswith("not engine") or collection_path.suffix != ".py":
        return None
    return "\npytestmark = pytest.mark.engine\n" in collection_path.read_text() or None


PROMISES = (
    "tests/browser/test_page.py::test_a_link_restores_a_view",
    "tests/contract/test_adapters.py",
    "tests/contract/test_diagnostics.py",
    "tests/contract/test_draws.py",
    "tests/contract/test_exactness.py::test_alone",
    "tests/contract/test_exactness.py::test_every_column",
    "tests/contract/test_logprob.py",
    "tests/contract/test_perplexity.py",
    "tests/contract/test_steering.py",
    "tests/families/test_families.py::test_a_family_has_the_numbers_of_transformers[gpt_neox-",
    "tests/faults/test_poison.py",
    "tests/server/test_kernel.py",
    "tests/server/test_vllm_internals.py::test_what_is_relied_on_is_as_it_was_read",
)
"""Tests with real engines that `make test` runs; all others with one are `full`."""


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave a test with a real engine to `make test-full`, unless it holds a promise."""
    if item.get_closest_marker("engine") and not item.nodeid.startswith(PROMISES):
        item.add_marker("full")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files in the order in which what they need can be there: engines, then shared servers.

    Those that need the same servers follow one another.
    """
    needs = find_needs(items)
    uses_engine = {item.path for item in items if item.get_closest_marker("engine")}
    places = {name: place for place, name in enumerate(CONFIGURATIONS)}

    def rank(item: pytest.Item) -> tuple[bool, list[int]]:
        return item.path in uses_engine, sorted(places[name] for name in needs[item.path])

    items.sort(key=rank)


def find_needs(items: list[pytest.Item]) -> dict[Path, set[str]]:
    """The shared servers that each file needs for these of its tests."""
    needs: dict[Path, set[str]] = {}
    for item in items:
        needs.setdefault(item.path, set()).update(list_servers(item))
    return needs


def pytest_collection_finish(session: pytest.Session) -> None:
    """Have the servers of the selected tests started, in the order of the tests."""
    is_controller = (
        session.config.getoption("numprocesses", None) and STARTER in session.config.stash
    )
    if not is_controller and not session.config.getoption("collectonly"):
        files: dict[str, list[str]] = {}
        for path, names in find_needs(session.items).items():
            for name in sorted(names):
                files.setdefault(name, []).append(name_file(path))
        session.config.stash[SERVERS].want(files)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Tell that a file has run, once the fixtures of its last test have ended."""
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            item.config.stash[SERVERS].finish(name_file(item.path))


def name_file(path: Path) -> str:
    """How a file of tests is called among those of the shared servers."""
    return path.relative_to(ROOT).as_posix()


def share(name: str) -> Any:
    """Make the fixture of a shared server."""

    @pytest.fixture(scope="module")
    def server(pytestconfig: pytest.Config) -> Server:
        return pytestconfig.stash[SERVERS].find(name)

    return server


for _name in CONFIGURATIONS:
    globals()[f"{_name}_server"] = share(_name)


# ------------------------------------------------------------------ clients


@pytest.fixture(scope="session")
def fake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with one fake model."""
    server = Server.start({"models": [fake_model()]}, tmp_path_factory.mktemp("fake"))
    server.wait_until_ready()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def fake_client(fake_server: Server) -> Iterator[Client]:
    """A client of the fake server."""
    with Client(fake_server.url, max_retries=0) as client:
        yield client


@pytest.fixture
def http(fake_server: Server) -> Iterator[httpx.Client]:
    """Plain requests to the fake server."""
    with httpx.Client(base_url=fake_server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def vllm_client(vllm_server: Server) -> Iterator[Client]:
    """A client of the vLLM server; requests go to `demo` unless they name another model."""
    with Client(vllm_server.url, model="demo", max_retries=0, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def real_client(real_server: Server) -> Iterator[Client]:
    """A client of the server with SmolLM2 as `vllm` and as `tlens`."""
    with Client(real_server.url, max_retries=0, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def compiled_client(compiled_server: Server) -> Iterator[Client]:
    """A client of the server with a compiled model, which requests go to."""
    with Client(compiled_server.url, model="compiled", timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def tlens_client(tlens_server: Server) -> Iterator[Client]:
    """A client of the TransformerLens server."""
    with Client(tlens_server.url, max_retries=0, timeout=300) as client:
        yield client
