"""TRL's `VLLMClient`: `generate`, `chat` and `get_sequence_logprobs`."""

import json
import sys

from trl.generation.vllm_client import VLLMClient

url, _, prompt = sys.argv[1:]
client = VLLMClient(base_url=url)
greedy = {"temperature": 0.0, "max_tokens": 8}
generated = client.generate([prompt], logprobs=2, **greedy)
chatted = client.chat([[{"role": "user", "content": prompt}]], logprobs=0, **greedy)
(prompt_ids,), (ids,) = generated["prompt_ids"], generated["completion_ids"]
scored = client.get_sequence_logprobs([prompt_ids + ids], [len(prompt_ids)], top_logprobs=5)
client.reset_prefix_cache()
found = {"generated": generated, "chatted": chatted, "scored": scored}
print(json.dumps(found))
