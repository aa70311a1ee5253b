#!/bin/sh
# Creates the missing secrets that docker-compose.yml names; safe to repeat.
# Makes what containers mount readable for their users, whatever umask the checkout was made with.
# Only the owner can open the directory. The files are readable by all, because each container reads
# them as its own user.
set -eu
chmod -R a+rX "$(dirname "$0")/Caddyfile" "$(dirname "$0")/prometheus" "$(dirname "$0")/grafana"
dir=${1:-$(dirname "$0")/secrets}
mkdir -p "$dir"
chmod 700 "$dir"
random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
keep() { [ -s "$dir/$1" ] || { printf '%s' "$2" > "$dir/$1"; chmod 644 "$dir/$1"; echo "made $dir/$1"; }; }
keep postgres_password "$(random)"
keep redis_password "$(random)"
keep redis.conf "requirepass $(cat "$dir/redis_password")"
keep secret_key "$(random)$(random)"
keep metrics_token "$(random)"
keep grafana_password "$(random)"
keep database_url "postgresql://site:$(cat "$dir/postgres_password")@postgres:5432/site"
keep redis_url "redis://:$(cat "$dir/redis_password")@redis:6379/0"
