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
  # The locks are resolved for this version; a later one needs some packages in other versions.
  for python in python3.11 python3 none; do
    "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2> /dev/null && break
  done
  [[ $python != none ]] || fail "Python 3.11 is not on the PATH; install it (uv python install 3.11)"
  say "making $venv with $(command -v "$python")"
  "$python" -m venv "$venv" || fail "could not make $venv; on Debian install python3.11-venv"
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
