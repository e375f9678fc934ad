#!/usr/bin/env bash
# Installs the locked dependencies and the project into .venv: install.sh server | install.sh dev
#
# `dev` adds what tests, checks and benchmarks need. CUDA packages are chosen where nvidia-smi finds
# a GPU, CPU packages elsewhere; LOGSTEER_VARIANT=cpu or cuda overrides that. A second call with
# unchanged lock files installs nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
scope=${1:-server}
venv=${VENV:-.venv}
variant=${LOGSTEER_VARIANT:-$(nvidia-smi -L > /dev/null 2>&1 && echo cuda || echo cpu)}
say() { echo "setup: $*" >&2; }
fail() { say "$1"; exit 1; }

[[ $scope == server || $scope == dev ]] || fail "usage: install.sh server|dev"
[[ $variant == cpu || $variant == cuda ]] || fail "LOGSTEER_VARIANT is '$variant', not cpu or cuda"
locks=("requirements/$variant.lock")
[[ $scope == dev ]] && locks+=(requirements/dev.lock)

stamp=$(cat "${locks[@]}" pyproject.toml requirements/install.sh | sha256sum | cut -d' ' -f1)
stamp_file="$venv/.installed-$scope"
[[ -f $stamp_file && $(< "$stamp_file") == "$stamp" ]] && exit 0

if [[ ! -x $venv/bin/python ]]; then
  for python in python3.11 python3.12 python3.13 python3; do
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2> /dev/null && break
  done || fail "no Python from 3.11 to 3.13 on the PATH; install one"
  say "making $venv with $(command -v "$python")"
  "$python" -m venv "$venv" || fail "could not make $venv; on Debian install python3-venv"
fi

pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)
uv=("$venv/bin/uv" pip --quiet)
export VIRTUAL_ENV=$PWD/$venv
[[ $venv == /* ]] && VIRTUAL_ENV=$venv
"$venv/bin/python" -c 'import uv' 2> /dev/null || "${pip[@]}" install 'uv>=0.9' \
  || fail "pip could not install uv; is a package index in reach?"

if [[ $variant == cpu ]]; then
  torch=$(grep '^torch==' requirements/cpu.lock)
  if [[ $("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2> /dev/null) != "${torch#*==}" ]]; then
    say "installing $torch"
    # A build that pip is configured to find comes first, then PyTorch's own index of CPU builds.
    "${pip[@]}" install --no-deps "$torch" 2> /dev/null \
      || "${uv[@]}" install --no-deps --torch-backend cpu "$torch" \
      || fail "$torch was found neither where pip looks nor in PyTorch's index of CPU builds;
setup: download that wheel for this Python, set PIP_FIND_LINKS to its folder, and try again"
  fi
fi

say "installing $(cat "${locks[@]}" | wc -l) locked packages ($variant) into $venv"
wanted=$(mktemp)
trap 'rm -f "$wanted"' EXIT
cat "${locks[@]}" | { [[ $variant == cpu ]] && grep -v '^torch==' || cat; } > "$wanted"
# --no-deps: the lock is the whole list; resolving again would bring back what the overrides leave out.
"${uv[@]}" install --no-deps -r "$wanted" || "${pip[@]}" install --no-deps -r "$wanted" \
  || fail "the packages above could not be installed; see the message before this one"
"${uv[@]}" install --no-deps --editable . || fail "the project itself could not be installed"
echo "$stamp" > "$stamp_file"
say "done"
