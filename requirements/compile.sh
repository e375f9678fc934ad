#!/usr/bin/env bash
# Writes the lock files anew from the .in files. Needs uv, and the CPU build of torch in reach: set
# UV_TORCH_BACKEND=cpu to take it from PyTorch's index, or UV_FIND_LINKS where it lies on disk.
set -euo pipefail
cd "$(dirname "$0")"
compile() { uv pip compile --quiet --no-header --no-annotate --python-version 3.11 "$@" > /dev/null; }

compile cpu.in server.in --override cpu-overrides.txt -o cpu.lock
env -u UV_TORCH_BACKEND -u UV_FIND_LINKS \
  uv pip compile --quiet --no-header --no-annotate --python-version 3.11 --python-platform linux \
  cuda.in server.in -o cuda.lock > /dev/null
compile dev.in -c cpu.lock --override cpu-overrides.txt -o dev-all.lock
# dev.lock holds only what the server's own lock does not, so that it fits both of them.
grep -vxFf cpu.lock dev-all.lock > dev.lock
rm dev-all.lock
