#!/usr/bin/env bash
# Prints the Debian mirror that this machine's apt is configured with, or MIRROR where that is set.
set -euo pipefail
uri=${MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 2> /dev/null \
  | grep '/debian/\?$' | sort -u | head -1)}
echo "${uri:-http://deb.debian.org/debian}"
