#!/usr/bin/env bash
# Installs the locked packages of LOGSTEER_VARIANT into VENV while an image is built.
#
# What reaches package indexes is mounted for this step alone and is in no layer: a certificate
# authority, pip.conf, uv.toml and a folder of wheels, each of which may be absent.
set -euo pipefail
export PIP_FIND_LINKS=/wheels UV_FIND_LINKS=/wheels UV_LINK_MODE=copy
if [[ -s /run/secrets/ca.pem ]]; then
  export PIP_CERT=/run/secrets/ca.pem SSL_CERT_FILE=/run/secrets/ca.pem
fi

# The project is installed as an editable one, which records where its two packages lie and none of
# their files. Empty packages stand in for them, so that an edit of the sources rebuilds a layer of a
# few megabytes instead of one of several gigabytes. The readme is empty for the same reason.
mkdir -p client/logsteer server/logsteer_server
touch client/README.md server/README.md client/logsteer/__init__.py server/logsteer_server/__init__.py
cp LICENSE server/LICENSE
# It compiles bytecode, which the user of the container could not write later.
requirements/install.sh server

# `torch==2.13.0` of the CUDA lock is met by a wheel 2.13.0+cpu, too, if the folder of wheels has one.
torch=$("$VENV/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))')
if [[ $LOGSTEER_VARIANT == cuda && $torch == *+cpu ]]; then
  echo "torch $torch was installed, which runs on no GPU: take its wheel out of the folder of wheels" >&2
  exit 1
fi
