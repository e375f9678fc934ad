"""TRL's `ServerDistillationTrainer`: a small student learns from the server's model.

Prints the losses, and how far the teacher's numbers inside the trainer are from transformers' own.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl.experimental.server_distillation import (
    ServerDistillationConfig,
    ServerDistillationTrainer,
)

url, model, directory = sys.argv[1:]
STEPS, TEMPERATURE, TOP = 24, 2.0, 32
PROMPTS = ["Once upon a time", "The little girl", "One day, a dog", "Tom and his mother"]

torch.manual_seed(0)
teacher = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
student = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).float()
tokenizer = AutoTokenizer.from_pretrained(model)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
trainer = ServerDistillationTrainer(
    model=student,
    args=ServerDistillationConfig(
        output_dir=str(Path(directory) / "student"), teacher_model_server_url=url,
        temperature=TEMPERATURE, beta=0.0, loss_top_k=TOP, max_completion_length=16,
        per_device_train_batch_size=4, max_steps=STEPS, learning_rate=3e-3, logging_steps=1,
        use_cpu=True, bf16=False, report_to=[], save_strategy="no", lr_scheduler_type="constant",
    ),
    train_dataset=Dataset.from_dict({"prompt": PROMPTS * STEPS}),
    processing_class=tokenizer,
)  # fmt: skip
largest = []
ask = trainer._get_teacher_token_logprobs_from_server


def ask_and_compare(inputs: dict, prompt_length: int) -> dict:
    """What the trainer asks, held against the model in transformers at the same temperature."""
    found = ask(inputs, prompt_length)
    with torch.no_grad():
        logits_BTV = teacher(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    rows_BTV = (logits_BTV[:, prompt_length - 1 : -1] / TEMPERATURE).log_softmax(-1)
    count = found["actual_logprobs"].shape[1]
    labels_BT = inputs["labels"][:, prompt_length:][:, :count]
    own_BT = rows_BTV[:, :count].gather(-1, labels_BT.clamp(min=0)[..., None]).squeeze(-1)
    best_BTK = rows_BTV[:, :count].topk(TOP).values
    kept = labels_BT != -100
    for name, wanted in (("actual_logprobs", own_BT), ("topk_logprobs", best_BTK)):
        largest.append(float((found[name] - wanted)[kept].abs().max()))
    return found


trainer._get_teacher_token_logprobs_from_server = ask_and_compare
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(json.dumps({"losses": losses, "largest": max(largest)}))
