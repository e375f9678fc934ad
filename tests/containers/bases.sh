#!/usr/bin/env bash
# Makes a stand-in for an image that others publish from Debian's packages, for machines that reach a
# Debian mirror and no image registry: bases.sh python|prometheus TAG
#
#   python      Debian 12 with its own Python 3.11, to be given as --build-arg PYTHON_BASE=TAG. The
#               image that the Dockerfile names has a newer patch release, in /usr/local.
#   prometheus  Debian's newest Prometheus, which runs as nobody on /prometheus, as upstream's does.
#
# It takes root, debootstrap, and an engine that `docker` reaches; MIRROR names another mirror.
set -euo pipefail
usage="usage: bases.sh python|prometheus TAG"
kind=${1:?$usage} tag=${2:?$usage}
here=$(dirname "$(realpath "$0")")
work=$(mktemp --directory)
trap 'rm -rf "$work"' EXIT
root=$work/root
mirror=$("$here/mirror.sh")
settings=()

strap() {
  debootstrap --variant=minbase --include="$2" "$1" "$root" "$mirror" > "$work/log" \
    || { tail -5 "$work/log" >&2; exit 1; }
}

case $kind in
  python)
    # python3-dev has the headers, which the compiler of kernels includes.
    strap bookworm ca-certificates,python-is-python3,python3-dev,python3-venv
    printf 'deb %s bookworm main\ndeb %s bookworm-updates main\n' "$mirror" "$mirror" \
      > "$root/etc/apt/sources.list"
    ;;
  prometheus)
    strap sid prometheus
    install --directory --owner nobody "$root/prometheus"
    settings=(--change 'ENTRYPOINT ["/usr/bin/prometheus"]' --change 'USER nobody'
      --change 'WORKDIR /prometheus' --change 'VOLUME /prometheus')
    ;;
  *) echo "$usage" >&2; exit 2 ;;
esac
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* \
  "$root"/usr/share/{doc,man,locale}/*
tar --create --numeric-owner --directory "$root" . \
  | docker import "${settings[@]}" - "$tag" > /dev/null
docker image inspect --format "{{.RepoTags}} {{.Size}} bytes" "$tag"
