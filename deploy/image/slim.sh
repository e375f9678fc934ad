#!/usr/bin/env bash
# Removes from VENV, which has the packages of LOGSTEER_VARIANT, what a server never runs: installers,
# tests, test programs, symbol tables.
set -euo pipefail
packages=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
before=$(du --summarize --block-size=M "$VENV" | cut -f1)

"$VENV/bin/python" -m pip --quiet uninstall --yes uv pip

# Folders by name, because some packages import from folders that are called tests.
rm -rf "$packages"/{torch/test,pandas/tests,numba/tests,pyarrow/tests,supervisor/tests}
find "$packages"/{numpy,scipy,sklearn,sympy} -depth -type d -name tests -exec rm -rf {} +
find "$packages/torch/bin" -type f ! -name torch_shm_manager -delete
find "$packages/torch/lib" -name '*test*.so' -delete

# vLLM's CPU kernels come with symbol tables five times the size of their code, torch's main library
# with 90 MB of them. Others are left alone: some tools that pack wheels write headers that strip breaks.
# So are libraries with code for GPUs, which no machine without one can try.
if [[ $LOGSTEER_VARIANT == cpu ]]; then
  find "$packages"/{vllm,torch/lib} -maxdepth 1 -name '*.so' -exec strip --strip-unneeded {} +
fi
"$VENV/bin/python" -c 'import torch; assert (torch.ones(8, 8) @ torch.ones(8, 8) == 8).all()'

echo "slim: $before before, $(du --summarize --block-size=M "$VENV" | cut -f1) after" >&2
