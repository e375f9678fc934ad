"""litellm: a completion, a conversation, and the latter streamed."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it downloads prices otherwise
import litellm

url, model, prompt = sys.argv[1:]
common = {"api_base": f"{url}/v1", "api_key": "none", "max_tokens": 8, "temperature": 0}
(text,) = litellm.text_completion(
    model=f"text-completion-openai/{model}", prompt=prompt, logprobs=1, **common
).choices
chat = common | {"messages": [{"role": "user", "content": prompt}]}
(answer,) = litellm.completion(f"hosted_vllm/{model}", **chat).choices
parts = [part.choices for part in litellm.completion(f"hosted_vllm/{model}", **chat, stream=True)]
logprobs = text.logprobs
found = {
    "completion": text.text,
    "logprobs": (logprobs if isinstance(logprobs, dict) else dict(logprobs))["token_logprobs"],
    "chat": answer.message.content,
    "streamed": "".join(choice.delta.content or "" for (choice,) in filter(None, parts)),
}
print(json.dumps(found))
