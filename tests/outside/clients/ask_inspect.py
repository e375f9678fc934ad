"""inspect-ai: an evaluation of one sample, which its scorer compares with what was expected."""

import json
import os
import sys

from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import exact

url, model, prompt = sys.argv[1:]
os.environ |= {"LOCAL_BASE_URL": f"{url}/v1", "LOCAL_API_KEY": "none"}
settings = GenerateConfig(max_tokens=8, temperature=0, logprobs=True, top_logprobs=2)
task = Task(dataset=[Sample(input=prompt, target="x")], scorer=exact(), config=settings)
(log,) = evaluate(task, model=f"openai-api/local/{model}", display="none", log_format="json")
assert log.status == "success", log.error
(sample,) = log.samples
(choice,) = sample.output.choices
found = {
    "chat": choice.message.text,
    "chat_logprobs": [entry.logprob for entry in choice.logprobs.content],
    "score": sample.scores["exact"].value,
}
print(json.dumps(found))
