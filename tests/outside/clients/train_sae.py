"""Train a sparse autoencoder with SAELens, as it is published, on captured activations:
`train_sae.py URL CAPTURE DIRECTORY SAMPLES FEATURES`. Prints its losses, as JSON.
"""

import json
import sys
from pathlib import Path

import torch
from sae_lens.config import SAETrainerConfig
from sae_lens.saes.topk_sae import TopKTrainingSAE, TopKTrainingSAEConfig
from sae_lens.training.sae_trainer import SAETrainer

from logsteer import Client

BATCH = 1024
SHOWN = 20


class RecordingTrainer(SAETrainer):
    """SAELens' trainer, whose losses are kept."""

    def step(self, sae_in):
        output = super().step(sae_in)
        # The reconstruction's squared error, of the activations' variance.
        variance = (output.sae_in - output.sae_in.mean(0)).pow(2).sum(-1).mean()
        losses.append((output.losses["mse_loss"] / variance).item())
        return output


url, name, directory, samples, features = sys.argv[1:]
torch.manual_seed(0)
client, losses = Client(url), []
index = client.captures.index(name)
loader = client.activation_loader(
    name, BATCH, 8 * BATCH, directory=Path(directory) / "shards", repeat=True
)
config = TopKTrainingSAEConfig(
    d_in=index.width, d_sae=int(features), k=16, normalize_activations="expected_average_only_in"
)
config.metadata.hook_name = f"blocks.{index.layers[0]}.hook_{index.hook}"
config.metadata.model_name = index.model
total = int(samples) // BATCH * BATCH
options = SAETrainerConfig(
    total_training_samples=total, train_batch_size_samples=BATCH, lr=1e-3, lr_end=1e-4,
    lr_decay_steps=total // BATCH // 5, n_batches_for_norm_estimate=20,
)  # fmt: skip
trainer = RecordingTrainer(options, TopKTrainingSAE(config), iter(loader))
trainer.fit().save_inference_model(Path(directory) / "sae")
step = max(1, len(losses) // SHOWN)
shown = [[n * BATCH, sum(losses[n : n + step]) / len(losses[n : n + step])]
         for n in range(0, len(losses), step)]  # fmt: skip
print(json.dumps({"losses": shown, "dead": int(trainer.dead_neurons.sum())}))
