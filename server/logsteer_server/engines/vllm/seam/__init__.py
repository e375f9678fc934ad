"""Every internal of vLLM that this engine relies on, and what it relies on, as data.

Of the modules beside this package, `config` (environment, arguments, description), `core` and
`blocks` (the engine's process) touch vLLM, and in the workers `runner`, `sampler`, `worker`,
`operation`, `corrections` and `cpu_kernels`; `requests`, `generation` and `follower` use what
`core` gives them. The others are free of it. Another model runner of vLLM's, such as V2, takes
another `runner`, and rows of its own here.

`tests/server/test_vllm_seam.py` holds each row against the vLLM that is installed, so that an
upgrade fails with the name of what moved; and it finds touches that have no row.
"""

from logsteer_server.engines.vllm.seam.internal import Internal
from logsteer_server.engines.vllm.seam.kernels import CPU_KERNELS
from logsteer_server.engines.vllm.seam.process import (
    BLOCKS,
    GENERATION,
    NODES,
    OUTPUTS,
    START,
    STEPS,
)
from logsteer_server.engines.vllm.seam.workers import RUNNER_ROWS, SAMPLING, WORKER

INTERNALS: tuple[Internal, ...] = (
    *START,
    *NODES,
    *STEPS,
    *BLOCKS,
    *OUTPUTS,
    *GENERATION,
    *RUNNER_ROWS,
    *SAMPLING,
    *WORKER,
    *CPU_KERNELS,
)
"""All rows."""
