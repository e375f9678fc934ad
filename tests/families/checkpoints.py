"""Tiny random checkpoints of model families, each with what makes its family different.

Weights have the scales of trained models, so that logits are peaked and the residual stream grows
from layer to layer; norms and biases are random, too, so that one that is left out shows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel

from tests.conftest import ROOT

LAYERS = 4
WIDTH = 64
HEADS = 2
CONTEXT = 256
TOKENIZER = ROOT / "demo" / "model"


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models: the transformers class of its configuration, and what it is given."""

    config: str
    values: dict[str, Any]
    embedding_std: float = 0.5
    """Smaller for families that scale embeddings up and use them as the head, too."""

    def make(self, directory: Path) -> None:
        """Write a random checkpoint of the family, with the demo model's tokenizer."""
        tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
        config_class: Callable[..., PretrainedConfig] = getattr(transformers, self.config)
        values = SHAPE | {"vocab_size": len(tokenizer)} | self.values
        config = config_class(**{name: v for name, v in values.items() if v is not None})
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        randomise(model, self.embedding_std)
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


SHAPE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": WIDTH // HEADS,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaConfig", GROUPED | {"rope_parameters": LLAMA3}),
    "mistral": Family("MistralConfig", GROUPED | {"sliding_window": 32}),
    "qwen2": Family("Qwen2Config", {"num_key_value_heads": 1}),
    "qwen3": Family("Qwen3Config", GROUPED),
    "qwen3_moe": Family("Qwen3MoeConfig", GROUPED | MOE),
    "mixtral": Family("MixtralConfig", GROUPED | {"num_local_experts": 4}),
    "gemma": Family("GemmaConfig", {"tie_word_embeddings": True}, 0.2),
    "gemma2": Family("Gemma2Config", {
        "tie_word_embeddings": True, "sliding_window": 32, "query_pre_attn_scalar": 32}, 0.2),
    "gemma3": Family("Gemma3TextConfig", {
        "tie_word_embeddings": True, "sliding_window": 32, "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}, 0.2),
    "phi3": Family("Phi3Config", {}),
    "gpt2": Family("GPT2Config", {
        "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": CONTEXT,
        "tie_word_embeddings": True}),
    "opt": Family("OPTConfig", {"ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH,
                                "tie_word_embeddings": True}),
    "gpt_neox": Family("GPTNeoXConfig", {"rotary_pct": 0.5}),
    "olmo2": Family("Olmo2Config", {}),
    "granite": Family("GraniteConfig", {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
        "logits_scaling": 2.0}),
    "cohere": Family("CohereConfig", {"tie_word_embeddings": True, "logit_scale": 0.5}),
    "stablelm": Family("StableLmConfig", {"partial_rotary_factor": 0.5}),
    "falcon": Family("FalconConfig", {"new_decoder_architecture": False, "multi_query": True,
                                      "parallel_attn": True, "bias": False,
                                      "head_dim": None}),
    "starcoder2": Family("Starcoder2Config", {}),
    "smollm3": Family("SmolLM3Config", {"no_rope_layers": [1, 1, 1, 0]}),
    "bloom": Family("BloomConfig", {
        "n_layer": LAYERS, "n_head": HEADS, "tie_word_embeddings": True}),
    "deepseek_v3": Family("DeepseekV3Config", {
        "q_lora_rank": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32,
        "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": WIDTH,
        "n_shared_experts": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "head_dim": None}),
    "granite_hybrid": Family("GraniteMoeHybridConfig", {
        "layer_types": ["mamba", "attention"] * (LAYERS // 2), "mamba_n_heads": 8,
        "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "num_local_experts": 0,
        "shared_intermediate_size": 2 * WIDTH, "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0}),
}  # fmt: skip


def randomise(model: PreTrainedModel, embedding_std: float) -> None:
    """Draw a model's weights anew: matrices of unit gain, norms about 1, small biases."""
    draw = torch.Generator().manual_seed(1)
    embeddings = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=draw)
            if weight.dim() >= 2 and "conv" not in name:
                embeds = any(weight is one for one in embeddings)
                weight.copy_(noise * (embedding_std if embeds else weight.shape[-1] ** -0.5))
            elif "norm" in name or "ln_" in name:
                weight.add_(0.1 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.1 * noise)
