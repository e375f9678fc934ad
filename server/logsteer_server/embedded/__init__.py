"""A model in this process, without a server, whose numbers carry their graph.

For losses of one's own. Columns of rows (log-probabilities, entropies and all others that a request
may name) can be differentiated: for a model of the program's own, with PEFT's adapters or without,
with respect to its parameters

    from transformers import AutoModelForCausalLM, AutoTokenizer
    from logsteer_server.embedded import LocalModel

    policy = AutoModelForCausalLM.from_pretrained("demo/model")
    model = LocalModel(policy, AutoTokenizer.from_pretrained("demo/model"))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-4)

    prompts = [model.encode("Once upon a time")] * 8
    samples = model.sample(prompts, max_tokens=16, seed=0)
    rows = model.columns(prompts, samples, ["logprob", "entropy"], batch_tokens=64)
    rewards = torch.tensor([float(reward(ids)) for ids in samples])
    weights = rewards - rewards.mean()
    loss = -sum(w * row["logprob"].sum() for w, row in zip(weights, rows))
    loss = loss - 0.01 * sum(row["entropy"].sum() for row in rows)
    loss.backward()
    optimizer.step()

and for one that is loaded from a path, as `LocalModel("demo/model")`, with respect to whatever is
put in its parameters' places: each call takes `parameters={name: tensor}`. The model's own are
never written to.

With `batch_tokens` the sequences are read in parts of at most so many tokens, and each part again
in the backward pass: the gradients are those of the whole, and only one part's activations are in
memory at a time. Calls take `steering` as requests do, and `hooks`: Python functions that act on
activations, which nothing does over HTTP. `demo/train_policy.py` trains a policy.

It needs the extra `tlens`. Axis letters: B sequences, T tokens, R rows, V vocabulary.
"""

from logsteer_server.embedded.model import FEATURES, Changes, DifferentiableRows, LocalModel

__all__ = ["FEATURES", "Changes", "DifferentiableRows", "LocalModel"]
