"""What can be set for each model, within the server's settings."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from logsteer.schemas import EngineKind, VariantFields
from logsteer.schemas.steering import VectorName
from logsteer_server.contract.engine import EngineSpec

Hook = Literal["resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post"]

NOT_OF_ENGINES = {"required", "default", "devices", "path", "max_replicas", "group", "hooks"}
"""Settings that an engine does not get, or not as they are set."""

MODEL_TOPICS = {
    "Which model": "id path engine default required",
    "Numbers": "dtype tf32 quantization max_model_len",
    "Machine": (
        "devices tensor_parallel pipeline_parallel replicas max_replicas group memory compile "
        "runner engine_args"
    ),
    "Steering, adapters, rows": (
        "steering_slots steering_depth steering_probes hooks capture_bytes adapter_slots "
        "adapter_rank chunk_bytes"
    ),
}
"""Topic -> settings of a model."""


class ModelSettings(BaseModel):
    """One resident model."""

    # What is wrong with a value is said without the value: it may be a key, or stand beside one.
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), hide_input_in_errors=True)

    id: str = Field(
        min_length=1,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$",
        description="The name that requests use.",
    )
    default: bool = Field(False, description="Whether requests that name no model mean this one.")
    engine: EngineKind = Field(
        "vllm", description="vllm for speed, transformer_lens for reach; fake is for tests."
    )
    path: str = Field(
        min_length=1,
        description="Directory of a checkpoint, a GGUF file, or an id on the hub, with @REVISION "
        "where it is not the main one.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = Field(
        "auto",
        description="Dtype that the model runs in; auto: the checkpoint's. float64 needs engine "
        "transformer_lens. Logits and softmax are computed in float32, unless the output layer is "
        "quantised.",
    )
    tf32: bool = Field(False, description="Let a GPU compute float32 products in TF32.")
    devices: Literal["auto", "cpu"] | list[int] = Field(
        "auto", description="GPUs by index, within CUDA_VISIBLE_DEVICES; auto: the first ones."
    )
    tensor_parallel: int = Field(1, ge=1, description="Devices that each layer is split over.")
    pipeline_parallel: int = Field(1, ge=1, description="Devices that layers are divided among.")
    replicas: int = Field(
        1,
        ge=1,
        le=256,
        description="Engine processes of this model. Each takes tensor_parallel x "
        "pipeline_parallel of the devices, in their order, and its share of the cores.",
    )
    max_replicas: int | None = Field(
        None,
        ge=1,
        le=256,
        description="Only on Ray: the largest number of replicas under load; null: `replicas`.",
    )
    group: str | None = Field(
        None,
        min_length=1,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$",
        description="Only on Ray: models of one group share their servers, which `reference` and "
        "`against` need; null: a group of its own.",
    )
    quantization: str | None = Field(
        None, description="A method of vLLM; null: the checkpoint's own."
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Longest sequence in tokens; null: as the checkpoint says. A LongRoPE model "
        "keeps its short factors: at most its original length, in vLLM one token less.",
    )
    memory: float | str | None = Field(
        None, description="Fraction of a GPU, or the key-value cache's size, such as 1GiB."
    )
    compile: bool = Field(
        True,
        description="Compile the model: a slower first start, faster answers; false: eager.",
    )
    required: bool = Field(True, description="Whether /readyz waits for this model.")
    chunk_bytes: int = Field(
        256 * 2**20,
        ge=2**20,
        description="Maximum bytes of logits in one product with the output layer. Each product "
        "reads the whole layer, so leave room for 256 rows: 1024 bytes a token of the vocabulary.",
    )
    steering_slots: int = Field(
        64, ge=0, description="Different steering plans that vLLM runs at once; 0: no steering."
    )
    steering_depth: int = Field(
        2, ge=1, le=64, description="Operations other than add that a plan may have at one layer."
    )
    steering_probes: int = Field(
        16,
        ge=1,
        le=128,
        description="Maximum probes of a request, counting each layer, and those of conditions.",
    )
    capture_bytes: int = Field(
        128 * 2**20,
        ge=2**10,
        description="Bytes of activations that vLLM captures at once, in float32.",
    )
    hooks: list[Hook] = Field(
        ["resid_post"],
        min_length=1,
        description="Activations of every layer that vLLM can steer and read: resid_pre, attn_out, "
        "resid_mid, mlp_out, resid_post. Each costs a call and a table of steering_slots a layer; "
        "transformer_lens always has all.",
    )
    adapter_slots: int = Field(
        0,
        ge=0,
        description="Different LoRA adapters that vLLM runs at once; 0: no adapters. On GPUs they "
        "need half precision.",
    )
    adapter_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = Field(
        16, description="The largest rank of an adapter in vLLM, which reserves memory for it."
    )
    runner: Literal["auto", "v1", "v2"] = Field(
        "auto",
        description="vLLM's model runner; auto: v2 on GPUs, except with pipeline stages and state "
        "space layers, else v1. v2 schedules a step while the one before it runs. On CPUs it is "
        "for tests: interpreted, with one rank and compile: false.",
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="Other arguments of the engine, under its own names."
    )

    @model_validator(mode="after")
    def _fit_together(self) -> "ModelSettings":
        needed = self.replicas * self.tensor_parallel * self.pipeline_parallel
        if self.replicas > 1 and isinstance(self.devices, list) and len(self.devices) != needed:
            raise ValueError(
                f"{self.replicas} replicas need {needed} devices, {needed // self.replicas} each, "
                f"and devices lists {len(self.devices)}"
            )
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas is below replicas, which is {self.replicas}")
        if self.dtype == "float64" and self.engine == "vllm":
            raise ValueError("dtype float64 takes engine transformer_lens; vllm has float32")
        return self

    def to_spec(self, directory: Path) -> EngineSpec:
        """Return what the engine gets; a relative path may be meant from `directory`."""
        local = directory / Path(self.path).expanduser()
        fields = self.model_dump(exclude=NOT_OF_ENGINES)
        devices = tuple(self.devices) if isinstance(self.devices, list) else self.devices
        path = str(local.resolve()) if local.exists() else self.path
        return EngineSpec(**fields, devices=devices, path=path, hooks=tuple(self.hooks))


class VariantSettings(VariantFields):
    """A variant of a resident model, for all callers."""

    name: VectorName
