#!/usr/bin/env bash
# The benchmarks on a GPU host.
#
#   MODEL=Qwen/Qwen3-8B bench/gpu.sh [--only ROW ...] [--runs N]
#     the rows of bench/run.py with that model (a directory, or a name that is fetched from the Hub);
#     writes bench/gpu-results.json, of the same kind as bench/results.json. DTYPE names another dtype.
#
#   bench/gpu.sh --bare [--output DIRECTORY]
#     the steering kernel, scored rows, sampling and the TransformerLens engine, which need PyTorch,
#     Triton, transformers and transformer-lens alone: no vLLM, no network, nothing is installed.
#     PYTHON names the interpreter that has them; MODEL, if set, is a directory. Writes gpu-check.md
#     and gpu-check.json. Without a GPU it runs a quick selection on the CPU.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ ${1:-} == --bare ]]; then
  shift
  python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || command -v python3)}
  export PYTHONPATH=$PWD/client:$PWD/server${PYTHONPATH:+:$PYTHONPATH}
  export HF_HUB_OFFLINE=1
  exec "$python" -m bench.gpu_check --bare "$@"
fi

if [[ -z ${MODEL:-} ]]; then
  echo "usage: MODEL=Qwen/Qwen3-8B bench/gpu.sh [ARGUMENTS OF bench.run], or bench/gpu.sh --bare" >&2
  exit 2
fi
python=${PYTHON:-.venv/bin/python}
[[ -n ${PYTHON:-} ]] || requirements/install.sh dev
if [[ ! -d $MODEL ]]; then
  echo "fetching $MODEL" >&2
  fetch='import sys, huggingface_hub; print(huggingface_hub.snapshot_download(sys.argv[1]))'
  MODEL=$("$python" -c "$fetch" "$MODEL" | tail -n 1)
fi
exec "$python" -m bench.run --model "$MODEL" --dtype "${DTYPE:-auto}" \
  --output bench/gpu-results.json "$@"
