"""The openai package for Python: a completion, a conversation, and the latter streamed."""

import json
import sys

from openai import OpenAI

url, model, prompt = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key="none")
common = {"model": model, "max_tokens": 8, "temperature": 0}
(text,) = client.completions.create(**common, prompt=prompt, logprobs=1).choices
chat = common | {"messages": [{"role": "user", "content": prompt}]}
(answer,) = client.chat.completions.create(**chat).choices
parts = [part.choices for part in client.chat.completions.create(**chat, stream=True)]
found = {
    "completion": text.text,
    "logprobs": text.logprobs.token_logprobs,
    "chat": answer.message.content,
    "streamed": "".join(choice.delta.content or "" for (choice,) in filter(None, parts)),
}
print(json.dumps(found))
