#!/usr/bin/env bash
# Writes the lock files anew from the .in files. Needs uv, and the CPU build of torch in reach: set
# UV_TORCH_BACKEND=cpu to take it from PyTorch's index, or UV_FIND_LINKS where it lies on disk.
set -euo pipefail
cd "$(dirname "$0")"
compile() { uv pip compile --quiet --no-header --no-annotate --python-version 3.11 "$@" > /dev/null; }

compile cpu.in server.in tlens.in --override cpu-overrides.txt --override tlens-overrides.txt \
  -o cpu.lock
env -u UV_TORCH_BACKEND -u UV_FIND_LINKS \
  uv pip compile --quiet --no-header --no-annotate --python-version 3.11 --python-platform linux \
  cuda.in server.in tlens.in --override tlens-overrides.txt -o cuda.lock > /dev/null
# What the output file holds already is kept where it can be, here as above.
cat cpu.lock dev.lock > dev-all.lock
# Tests interpret the kernel for GPUs on a CPU, so they need Triton all the same.
grep -v ^triton cpu-overrides.txt > dev-overrides.txt
compile dev.in -c cpu.lock --override dev-overrides.txt -o dev-all.lock
# dev.lock holds only what the server's own lock does not, so that it fits both of them.
grep -vxFf cpu.lock dev-all.lock > dev.lock
rm dev-all.lock dev-overrides.txt
