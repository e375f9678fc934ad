"""lm-evaluation-harness on a logsteer server: `LogsteerLM` is its model "logsteer".

Importing this package registers the model, and `logsteer-eval` is the harness's own command with
it registered.
"""

from logsteer.lm_eval.model import LogsteerLM, main

__all__ = ["LogsteerLM", "main"]
