"""Trains the demo model: a byte-fallback tokenizer and a small Llama on the text of corpus.py."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jinja2
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import corpus

HERE = Path(__file__).resolve().parent
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIALS = (PAD, BOS, EOS, *ROLES)
BYTES = tuple(f"<0x{value:02X}>" for value in range(256))
VOCABULARY = 1536
POSITIONS = 1024

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('The roles are system, user and assistant.') -}}
{%- endif -%}
{{- '<|' + message['role'] + '|>' + message['content'] -}}
{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

# A word carries the one space before it; a digit stands alone; a run of spaces leaves its last
# space to the word that follows.
WORDS = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Plan:
    """The sizes of one training run."""

    steps: int
    seed: int
    batch_tokens: int = 4096
    held_out_tokens: int = 8192
    short: int = 256
    # Every fourth batch holds windows of the full length, so that no position is left untrained.
    long_every: int = 4
    rate: float = 4e-3
    warmup: int = 40
    log_every: int = 50


def rendered(messages: list[corpus.Message]) -> str:
    """The text of a chat under the chat template, its closing eos left to the packing."""
    template = jinja2.Environment().from_string(CHAT_TEMPLATE)  # noqa: S701 (text, not HTML)
    text: str = template.render(messages=messages, bos_token=BOS, eos_token=EOS)
    return text.removeprefix(BOS).removesuffix(EOS)


def merges(texts: Iterator[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """The pieces and merges that byte-pair training finds in the texts."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
    alphabet = [chr(code) for code in range(32, 127)] + ["\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIALS) - len(BYTES),
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    model = json.loads(learner.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return pieces, [(left, right) for left, right in model["merges"]]


def tokenizer_of(texts: Iterator[str]) -> PreTrainedTokenizerFast:
    """The tokenizer: specials, then the 256 bytes, then the pieces learnt from the texts.

    Spaces stay plain spaces, with no stand-in character, so every text decodes to itself.
    """
    pieces, pairs = merges(texts)
    vocabulary = {piece: index for index, piece in enumerate((*SPECIALS, *BYTES, *pieces))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    core.post_processor = TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS}:1 $B:1",
        special_tokens=[(BOS, vocabulary[BOS])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=list(ROLES),
        model_max_length=POSITIONS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def model_of(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untrained Llama of under a million weights whose heads are 32 wide."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


@dataclass(frozen=True)
class Stream:
    """Documents end to end as one row of tokens, with the place where each begins."""

    tokens_T: Tensor
    starts: Tensor

    def windows(self, length: int, count: int, generator: torch.Generator) -> Tensor:
        """Windows [B, T] that each begin with a document, as every prompt does."""
        usable = self.starts[self.starts + length <= self.tokens_T.numel()]
        chosen = usable[torch.randint(usable.numel(), (count,), generator=generator)]
        return self.tokens_T[chosen[:, None] + torch.arange(length)]


def stream_of(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Stream:
    """The texts as one stream, each between bos and eos."""
    rows = [[*row, tokenizer.eos_token_id] for row in tokenizer(texts)["input_ids"]]
    lengths = torch.tensor([0, *(len(row) for row in rows[:-1])])
    return Stream(torch.tensor([token for row in rows for token in row]), lengths.cumsum(0))


def rate_at(step: int, plan: Plan) -> float:
    """The learning rate of a step: a short rise, then a half cosine down to a fiftieth."""
    if step < plan.warmup:
        return plan.rate * (step + 1) / plan.warmup
    done = (step - plan.warmup) / max(1, plan.steps - plan.warmup)
    return plan.rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def loss_of(model: LlamaForCausalLM, tokens_BT: Tensor) -> Tensor:
    """The mean next-token loss, in nats."""
    logits_BTV = model(input_ids=tokens_BT[:, :-1], use_cache=False).logits
    loss: Tensor = torch.nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten()
    )
    return loss


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, stream: Stream, plan: Plan) -> float:
    """The mean loss on the same few windows of text that training never sees."""
    generator = torch.Generator().manual_seed(plan.seed)
    losses = [
        loss_of(model, stream.windows(length, plan.held_out_tokens // length, generator)).item()
        for length in (plan.short, POSITIONS)
    ]
    return sum(losses) / len(losses)


def train(model: LlamaForCausalLM, training: Stream, held_out: Stream, plan: Plan) -> list[str]:
    """The lines of the log, after training the model in place."""
    decayed = [weight for weight in model.parameters() if weight.dim() > 1]
    plain = [weight for weight in model.parameters() if weight.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
    )
    generator = torch.Generator().manual_seed(plan.seed)
    began = time.monotonic()
    lines = ["step loss held-out-loss seconds"]
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, plan)
        length = POSITIONS if (step + 1) % plan.long_every == 0 else plan.short
        batch_BT = training.windows(length, plan.batch_tokens // length, generator)
        loss = loss_of(model, batch_BT)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % plan.log_every == 0 or step + 1 == plan.steps:
            held = held_out_loss(model, held_out, plan)
            seconds = time.monotonic() - began
            lines.append(f"{step + 1} {loss.item():.4f} {held:.4f} {seconds:.1f}")
            print(lines[-1], flush=True)
    return lines


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=HERE / "model", help="folder to write")
    parser.add_argument("--log", type=Path, default=HERE / "training-log.txt", help="log to write")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="of the text and of the weights")
    parser.add_argument("--documents", type=int, default=40_000, help="documents to generate")
    return parser.parse_args()


def main() -> None:
    """Nothing; trains and saves the tokenizer, the model and the log."""
    options = parsed()
    plan = Plan(steps=options.steps, seed=options.seed)
    torch.manual_seed(plan.seed)
    torch.use_deterministic_algorithms(True)
    texts = list(corpus.documents(plan.seed, options.documents, rendered))
    split = len(texts) * 49 // 50
    # The answers count many times over, so that nearly every one becomes a single token.
    tokenizer = tokenizer_of(iter(texts[:split] + corpus.names() * 300))
    model = model_of(tokenizer)
    print(f"{model.num_parameters()} weights, {len(tokenizer)} tokens", flush=True)
    training, held_out = (stream_of(tokenizer, part) for part in (texts[:split], texts[split:]))
    print(f"{training.tokens_T.numel()} training tokens", flush=True)
    lines = train(model, training, held_out, plan)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    options.log.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
