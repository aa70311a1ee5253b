#!/bin/sh
# Replaces the containers of a service without a gap: as many new ones are started beside the old ones,
# and these are stopped, which lets them finish, once the new ones are healthy. On a host that cannot
# hold both, `docker compose up -d --no-deps SERVICE` stops the old ones first.
#   sh deploy/upgrade.sh worker web
set -eu
cd "$(dirname "$0")/.."
for service in "$@"; do
    old=$(docker compose ps --quiet "$service")
    count=$(echo "$old" | wc -w)
    docker compose up -d --wait --no-deps --no-recreate --scale "$service=$((count * 2))" "$service"
    # Together: each drains for as long as its own generations take.
    # shellcheck disable=SC2086  # One word for each container.
    docker stop $old
    # shellcheck disable=SC2086
    docker rm $old
done
