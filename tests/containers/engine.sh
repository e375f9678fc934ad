#!/usr/bin/env bash
# A Docker Engine from Debian's packages, without installing it: engine.sh start|stop|env DIRECTORY
#
#   start  unpack Debian's engine into DIRECTORY and start dockerd on DIRECTORY/docker.sock
#   env    print the variables that point docker at it: eval "$(tests/containers/engine.sh env DIRECTORY)"
#   stop   end dockerd, undo its bridge and firewall rules, remove all of DIRECTORY but the packages
#
# For machines that have root and a Debian mirror, and neither an engine nor a way to install one.
# `start` needs debootstrap and a kernel with overlayfs, bridges and network address translation.
# MIRROR names the mirror; otherwise the one that apt is configured with is used.
set -euo pipefail
verb=${1:-}
directory=$(realpath --canonicalize-missing "${2:?usage: engine.sh start|stop|env DIRECTORY}")
root=$directory/root
here=$(dirname "$(realpath "$0")")
say() { echo "engine: $*" >&2; }

# Debian 13 is the first with an engine that knows `--start-interval` of health checks.
unpack() {
  [[ -x $root/usr/sbin/dockerd ]] && return
  say "unpacking Debian's engine into $root"
  mkdir -p "$directory"
  debootstrap --variant=minbase \
    --include=ca-certificates,docker.io,docker-cli,docker-buildx,docker-compose,iptables,procps \
    trixie "$root" "$("$here/mirror.sh")" > "$directory/debootstrap.log" \
    || { tail -5 "$directory/debootstrap.log" >&2; exit 1; }
}

# Runs a command with the engine's /usr in place of the machine's, and every other path as it is.
inside() {
  unshare --mount --propagation private bash -c '
    mount --bind "$0/usr" /usr
    mount --bind "$0/etc/alternatives" /etc/alternatives
    exec "$@"' "$root" "$@"
}

start() {
  unpack
  mkdir -p "$directory/client"
  echo "{\"cliPluginsExtraDirs\": [\"$root/usr/libexec/docker/cli-plugins\"]}" \
    > "$directory/client/config.json"
  cat /proc/sys/net/ipv4/ip_forward > "$directory/ip_forward"
  # setsid: the engine outlives the terminal that started it, and is ended by `stop`.
  inside setsid /usr/sbin/dockerd --host "unix://$directory/docker.sock" --group root \
    --data-root "$directory/data" --exec-root "$directory/exec" --pidfile "$directory/docker.pid" \
    > "$directory/dockerd.log" 2>&1 < /dev/null &
  for _ in {1..60}; do
    if curl --silent --fail --unix-socket "$directory/docker.sock" http://docker/_ping > /dev/null; then
      say "dockerd $(cat "$directory/docker.pid") listens at $directory/docker.sock"
      return
    fi
    sleep 0.5
  done
  tail -20 "$directory/dockerd.log" >&2
  exit 1
}

print_env() {
  echo "export DOCKER_HOST=unix://$directory/docker.sock"
  echo "export DOCKER_CONFIG=$directory/client"
  command -v docker > /dev/null || echo "export PATH=\$PATH:$root/usr/bin"
}

# The chains that dockerd made are called DOCKER something, and other rules name them or docker0.
undo_network() {
  inside bash -c '
    for table in nat filter; do
      iptables -t $table -S | grep -i docker | grep "^-A" | grep -v "^-A DOCKER" | sed "s/^-A/-D/" \
        | while read -r -a rule; do iptables -t $table "${rule[@]}" || true; done
      iptables -t $table -S | sed -n "s/^-N \(DOCKER.*\)/\1/p" | while read -r chain; do
        iptables -t $table -F "$chain"; done
      iptables -t $table -S | sed -n "s/^-N \(DOCKER.*\)/\1/p" | while read -r chain; do
        iptables -t $table -X "$chain" || true; done
    done
    iptables -P FORWARD ACCEPT'
  ip link delete docker0 2> /dev/null || true
  [[ ! -f $directory/ip_forward ]] || cat "$directory/ip_forward" > /proc/sys/net/ipv4/ip_forward
}

stop() {
  local pid
  pid=$(cat "$directory/docker.pid" 2> /dev/null || true)
  if [[ $pid ]] && kill "$pid" 2> /dev/null; then
    for _ in {1..120}; do kill -0 "$pid" 2> /dev/null || break; sleep 0.5; done
    undo_network
  fi
  rm -rf "$directory/data" "$directory/exec" "$directory/client" "$directory/docker.pid"
}

case $verb in
  start) start ;;
  env) print_env ;;
  stop) stop ;;
  *) say "usage: engine.sh start|stop|env DIRECTORY"; exit 2 ;;
esac
