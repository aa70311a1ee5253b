#!/bin/sh
# Replaces the containers of services without a gap: as many new ones are started beside the old ones.
# These are stopped once the new ones are healthy, a worker with its models loaded. On a host that
# cannot hold both, `docker compose up -d --no-deps SERVICE` stops the old ones first.
#   sh deploy/upgrade.sh worker web
set -eu
cd "$(dirname "$0")/.."
trap : INT TERM HUP  # Who interrupts this ends the wait, and the new containers are removed.

# Waits until these containers are healthy; false once one is unhealthy, or has ended or been restarted.
# The old ones need not be healthy: `up --wait` would wait for them too.
are_healthy() {
    state='{{.State.Status}} {{.State.Health.Status}} {{if .RestartCount}}restarted{{end}}'
    while states=$(docker inspect --format "$state" "$@"); do
        case $states in
            *unhealthy* | *exited* | *restart*) return 1 ;;
            *starting*) sleep 1 || return 1 ;;
            *) return 0 ;;
        esac
    done
    return 1
}

for service in "$@"; do
    old=$(docker compose ps --quiet "$service")
    if [ -z "$old" ]; then
        echo "$service: none runs. Start it with docker compose up -d $service" >&2
        exit 1
    fi
    docker compose rm --force "$service"  # Of stopped ones, `up` would start the old release again.
    twice=$(($(echo "$old" | wc -w) * 2))
    started=yes
    docker compose up -d --no-deps --no-recreate --scale "$service=$twice" "$service" || started=
    new=$(docker compose ps --all --quiet "$service" | grep -vF "$old" || true)
    # shellcheck disable=SC2086  # $old and $new: a word for each container.
    if [ -n "$started" ] && are_healthy $new; then
        docker stop $old
        docker rm $old
    else
        for one in $new; do
            docker logs --tail 10 "$one" >&2 || true  # They say why, and go with the container.
            docker rm --force "$one"
        done
        echo "$service: the new containers did not become healthy; the old ones run on." >&2
        exit 1
    fi
done
