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
#
#   bench/gpu.sh --order first|second --output DIRECTORY
#     what a GPU that is lent for minutes is asked, in order of value, with PYTHON, after pack.sh
#     (SITE: what it packed). first: the machine, rows, then stock vLLM and ours on the same weights,
#     alone. second, side by side: five families compiled, adapters, TransformerLens, the exactness
#     tests. Each within the 10 minutes that one command may take. The plans:
#       15 minutes  SHAPE=4b RUNS=3 --order first, then --order second
#       10          SHAPE=4b RUNS=2 --order first
#        6          SHAPE=0.6b RUNS=2 --order first
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=${SITE:+$SITE:}$PWD/client:$PWD/server:$PWD${PYTHONPATH:+:$PYTHONPATH}

if [[ ${1:-} == --bare ]]; then
  shift
  python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || command -v python3)}
  export HF_HUB_OFFLINE=1
  exec "$python" -m bench.gpu_check --bare "$@"
fi

if [[ ${1:-} == --order ]]; then
  python=${PYTHON:-.venv/bin/python} order=$2 output=$4
  export HF_HUB_OFFLINE=1
  [[ -d /dev/shm ]] && export TMPDIR=${TMPDIR:-/dev/shm}
  mkdir -p "$output"
  check() { "$python" -m bench.gpu_check --output "$output/$1" --only "${@:2}"; }
  if [[ $order == first ]]; then
    check first machine rows stock
  else
    check families families-float32 & check tlens adapters tlens tlens-speed &
    LOGSTEER_TEST_DEVICES=auto LOGSTEER_TEST_RUNNER=v2 timeout 540 "$python" -m pytest -q --tb=short \
      -p no:cacheprovider -n 0 tests/contract/test_exactness.py > "$output/exactness.log" 2>&1 &
    wait
  fi
  exit
fi

if [[ -z ${MODEL:-} ]]; then
  echo "usage: MODEL=Qwen/Qwen3-8B bench/gpu.sh [ARGUMENTS OF bench.run], or --bare, or --order" >&2
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
