#!/bin/sh
# Serves a configuration on a Ray of this machine alone, until it is interrupted:
#
#   deploy/ray/local.sh CONFIG
#
# With NODES=2, say, Ray has a head without models and two nodes with some. An end takes 40 s at
# most for the service, of which running requests have 30 s, and as much for each node.
set -eu
config=$(realpath "$1")
nodes=${NODES:-0}
logsteer-server --check --config "$config"

# Whoever has the token may run code: it is new at each start.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
# Ray would kill models for what other programs of this machine take.
export RAY_memory_monitor_refresh_ms=0
# A replica that hangs cannot end by itself.
export RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS=1
# Few cores start many processes at once.
export RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S=60
# Otherwise a request goes to a replica that hangs where the other is 0.1 s late with its count.
export RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S=1

# Sockets below it have names of at most 107 characters, which a longer $TMPDIR would take.
directory=$(mktemp -d /tmp/logsteer-ray-XXXXXX)
started=

finish() {
    trap '' INT TERM
    for process in $started; do
        kill -INT "$process" 2>/dev/null || continue
        for _ in $(seq 40); do
            sleep 1
            kill -0 "$process" 2>/dev/null || continue 2
        done
        kill -KILL "$process" 2>/dev/null || true
    done
    rm -rf "$directory"
}
trap finish EXIT
trap 'exit 0' INT TERM

start() { # COMMAND...: out of a terminal's reach, and killed by the kernel when this script ends
    setsid env --default-signal=INT setpriv --pdeathsig KILL "$@" &
    started="$! $started"
}

start_node() { # ADDRESS CPUS OPTION...
    address=$1 cpus=$2
    shift 2
    # CPUs are logical: the configuration says what runs here.
    start ray start --block --node-ip-address="$address" --num-cpus="$cpus" \
        --object-store-memory=80000000 --min-worker-port=0 --max-worker-port=0 \
        --dashboard-agent-listen-port=0 --temp-dir="$directory/$address" "$@"
}

if [ "$nodes" = 0 ]; then # one node alone keeps to the loopback address
    export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0
    head=127.0.0.1 cpus=64
else
    head=127.0.0.2 cpus=0
fi
echo "Ray's logs are in $directory/$head/session_latest/logs."
# Ray's own port for remote drivers, which nobody uses here: at 10001 it would share another Ray's.
start_node "$head" "$cpus" --head --port=0 --include-dashboard=false \
    --ray-client-server-port="$(shuf -i 20000-32000 -n 1)" > "$directory/head.log"
until [ -s "$directory/$head/ray_current_cluster" ]; do
    kill -0 "${started% }" 2>/dev/null || { cat "$directory/head.log"; exit 1; }
    sleep 0.2
done
RAY_ADDRESS=$(cat "$directory/$head/ray_current_cluster")
export RAY_ADDRESS
for number in $(seq "$nodes"); do
    start_node "127.0.0.$((number + 2))" 64 --address="$RAY_ADDRESS" > "$directory/$number.log"
done

start serve run --name logsteer logsteer_server.cluster:build_listening config="$config"
wait "${started%% *}" || true
exit 1 # no interrupt ended it
