"""Generation by any engine, called where its jobs are made."""

from collections.abc import Sequence

from logsteer_server.contract.engine import Engine
from logsteer_server.contract.jobs import GenerateJob, GenerateOutput, Policy

GREEDY = Policy(temperature=0.0)


def generate(engine: Engine, jobs: Sequence[GenerateJob]) -> list[list[int]]:
    """Return the tokens of each job. Errors: RuntimeError where one fails."""
    engine.add(list(enumerate(jobs)))
    tokens: dict[int, list[int]] = {}
    while engine.busy:
        for index, result in engine.step():
            if not isinstance(result, GenerateOutput):
                raise RuntimeError(str(result))
            tokens[index] = result.token_ids.tolist()
    return [tokens[index] for index in range(len(jobs))]
