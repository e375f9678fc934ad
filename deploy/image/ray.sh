#!/usr/bin/env bash
# Adds what the extra `ray` takes to VENV, and copies what it added to ADDED, in folders of the same
# names: a layer of its own on top of the image without Ray.
#
# Versions are those that the tests run with, of dev.lock, and the image's own of LOGSTEER_VARIANT's
# lock. Files that reach package indexes are mounted as for install.sh.
set -euo pipefail
export PIP_FIND_LINKS=/wheels UV_FIND_LINKS=/wheels UV_LINK_MODE=copy
if [[ -s /run/secrets/ca.pem ]]; then
  export PIP_CERT=/run/secrets/ca.pem SSL_CERT_FILE=/run/secrets/ca.pem
fi

installer=$(mktemp --directory)
python -m venv "$installer"
"$installer/bin/pip" --quiet install 'uv>=0.9'
marker=$(mktemp)
"$installer/bin/uv" pip --quiet install --python "$VENV/bin/python" --compile-bytecode \
  --constraint "requirements/$LOGSTEER_VARIANT.lock" --constraint requirements/dev.lock \
  --editable 'server[ray]'

mkdir -p "$ADDED"
cd "$VENV"
find . -newercc "$marker" \( -type f -o -type l \) -print0 \
  | tar --create --null --files-from - | tar --extract --directory "$ADDED"
"$VENV/bin/ray" --version >&2
echo "ray: $(du --summarize --block-size=M "$ADDED" | cut -f1) added" >&2
rm -rf "$installer" "$marker"
