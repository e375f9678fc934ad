"""lm-evaluation-harness on a logsteer server: `LogsteerLM` is its model "logsteer".

Importing this package registers the model, and `logsteer-eval` is the harness's own command with
it registered.
"""

try:
    from logsteer.lm_eval.model import LogsteerLM, main
except ModuleNotFoundError as error:
    if error.name != "lm_eval":
        raise
    detail = 'lm-evaluation-harness is not installed: pip install "logsteer[lm-eval]"'
    raise ImportError(detail) from None

__all__ = ["LogsteerLM", "main"]
