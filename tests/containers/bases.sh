#!/usr/bin/env bash
# Makes a stand-in for the Python base image from Debian's packages, for machines that reach a
# Debian mirror and no image registry: bases.sh TAG
#
# It is Debian 12 with Debian's own Python 3.11, as root of a file system that is imported under
# TAG, to be given as --build-arg PYTHON_BASE=TAG. The image that the Dockerfile names differs in
# this: its interpreter is newer by some patch releases and lies in /usr/local.
# It takes root, debootstrap, and an engine that `docker` reaches; MIRROR names another mirror.
set -euo pipefail
tag=${1:?usage: bases.sh TAG}
here=$(dirname "$(realpath "$0")")
work=$(mktemp --directory)
trap 'rm -rf "$work"' EXIT
mirror=$("$here/mirror.sh")

# python3-dev has the headers, which the compiler of kernels includes.
debootstrap --variant=minbase --include=ca-certificates,python-is-python3,python3-dev,python3-venv \
  bookworm "$work/root" "$mirror" > "$work/log" || { tail -5 "$work/log" >&2; exit 1; }
printf 'deb %s bookworm main\ndeb %s bookworm-updates main\n' "$mirror" "$mirror" \
  > "$work/root/etc/apt/sources.list"
rm -rf "$work"/root/var/cache/apt/* "$work"/root/var/lib/apt/lists/* "$work"/root/var/log/* \
  "$work"/root/usr/share/{doc,man,locale}/*
tar --create --numeric-owner --directory "$work/root" . | docker import - "$tag" > /dev/null
docker image inspect --format "{{.RepoTags}} {{.Size}} bytes" "$tag"
