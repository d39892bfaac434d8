# Everything below needs Python 3.11 or later, make and the package registries; `make run` needs nothing else, `make test`
# a redis-server, openssl, nginx, promtool and PostgreSQL, which it installs where it may (root on Debian).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What the gateway needs to run is installed; and then what tests, checks and builds need, too.
RUNS := $(VENV)/.runs
INSTALLED := $(VENV)/.installed
COMPILED := build/compiled
# More than there may be cores: tests mostly wait.
TESTS_AT_ONCE := 4
# What failed among others runs once more, alone, as CPython's `regrtest --rerun` does: both outcomes are printed. What
# passes then is a flaky test, and is to be mended.
ALONE := -q -x --last-failed --last-failed-no-failures none
# What is compiled is kept, also where the environment says otherwise: each of hundreds of processes would compile anew.
export PYTHONDONTWRITEBYTECODE :=
# Rooms of tests that start no server. They wait for nothing, so there are no more of them at once than cores.
FAST := tenantbench tests/policies tests/config tests/request tests/simulated/test_engine_model.py tests/tidy --ignore=tests/tidy/test_deploy.py
# All that is in a distribution. Built from a copy: compiled modules beside the sources would be found before them.
PACKAGED := pyproject.toml hatch_build.py README.md CHANGELOG.md LICENSE config.example.yaml policies gateway backends simulation
# Finds the compiled modules before the sources, in every process that is started.
WITH_COMPILED := PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/$(COMPILED):$(CURDIR)
# The same, where `make compiled` has been run and nothing changed since.
WHERE_COMPILED = $(shell $(MAKE) --question compiled >/dev/null 2>&1 && echo '$(WITH_COMPILED)')
OF_COMPILED = $(if $(WHERE_COMPILED),-o pythonpath=)

.PHONY: run test test-fast servers check format test-vllm test-deploy bench bench-gpu compiled test-compiled wheel test-install release-check docs lock clean

run: $(RUNS)  ## the gateway with config.example.yaml: simulated engines, all state in memory; also PORT=, ADMIN_PORT=
	@$(WHERE_COMPILED) $(BIN)/fairgate serve -c config.example.yaml --access-log access.log \
	    $(if $(PORT),--port $(PORT)) $(if $(ADMIN_PORT),--admin-port $(ADMIN_PORT))

# The compiled gateway takes less time, and is the same code; what can only be tested on the sources follows.
test: $(INSTALLED) servers  ## the tests that need no vLLM: on the compiled gateway if `make compiled` has made this one
	$(WHERE_COMPILED) $(BIN)/pytest -q -n $(TESTS_AT_ONCE) --dist worksteal $(OF_COMPILED) \
	    || $(WHERE_COMPILED) $(BIN)/pytest $(ALONE) $(OF_COMPILED)
	$(if $(WHERE_COMPILED),$(BIN)/pytest -q -n 2 -m interpreted_only $(shell grep -rl --include='test_*.py' interpreted_only tests))

test-fast: $(INSTALLED)  ## at each save, below a minute: decisions, config, readers and tidiness, without servers and network
	$(BIN)/pytest -q -n auto --maxprocesses $(TESTS_AT_ONCE) --dist worksteal -m "not slow" $(FAST)

# RUNLEVEL=1: the package starts no server of its own. Where it cannot be installed, the tests that need it say so.
servers:
	@{ command -v redis-server && command -v openssl && command -v nginx \
	    && command -v promtool && command -v chromium && ls /usr/lib/postgresql/*/bin/initdb; } >/dev/null 2>&1 \
	    || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq \
	        && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	            redis-server openssl nginx-light prometheus postgresql chromium logrotate pgbouncer jq; } \
	    || echo "redis-server, openssl, nginx, promtool, PostgreSQL or chromium is missing and could not be installed: the" \
	        "tests that need the first two will fail, those that need the others are skipped" >&2

check: $(INSTALLED)  ## format, lint, types, import rules; what the forge reads
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/zizmor --offline --quiet --no-progress .github
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema -q --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(BIN)/check-jsonschema -q --builtin-schema vendor.dependabot .github/dependabot.yml

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test-vllm: $(INSTALLED)  ## installs a pinned CPU build of vLLM (3.5 GB) and runs the tests against it
	bash deploy/real-vllm/setup.sh
	FAIRGATE_TEST_VLLM=1 $(BIN)/pytest -q -m vllm tests/vllm --timeout 600

test-deploy: $(INSTALLED)  ## as root on Debian: what the Dockerfile builds, run by systemd's unit
	FAIRGATE_TEST_DEPLOY=1 $(BIN)/pytest -q -s -m deploy tests/deploy

bench-gpu: compiled  ## waits, shares, bursts and agents before a vLLM of yours: make bench-gpu URL=http://localhost:8000
	$(WITH_COMPILED) $(BIN)/python -m bench.gpu $(URL)

compiled: $(COMPILED)/.built  ## the gateway as machine code, in build/compiled; needs a C compiler, takes some minutes

test-compiled: compiled servers  ## the tests on the compiled gateway
	$(WITH_COMPILED) $(BIN)/pytest -q -n $(TESTS_AT_ONCE) --dist worksteal -o pythonpath= \
	    || $(WITH_COMPILED) $(BIN)/pytest $(ALONE) -o pythonpath=

# Eight gateways, ten workloads of 7 s on average, two rounds: some 24 minutes for each of the two engines.
TENANTBENCH = PATH=$(CURDIR)/$(BIN):$$PATH $(WITH_COMPILED) $(BIN)/python -m tenantbench
bench: compiled  ## docs/benchmarks.md: eight gateways by tenantbench, a real vLLM, decisions; needs nginx and redis-server
	$(TENANTBENCH) install vllm-router sglang-router litellm
	$(TENANTBENCH) run --subject fairgate --seconds 7 --rounds 2 --out tenantbench-results/simulated
	$(TENANTBENCH) run --subject fairgate --engine llama --seconds 7 --rounds 2 --out tenantbench-results/llama
	bash deploy/real-vllm/setup.sh
	$(WITH_COMPILED) $(BIN)/python -m bench.all

$(COMPILED)/.built: $(INSTALLED) pyproject.toml hatch_build.py \
    $(shell find policies gateway backends simulation -type f -not -path '*/__pycache__/*')
	rm -rf build && mkdir -p build/source
	cp -r $(PACKAGED) build/source
	cd build/source && HATCH_BUILD_HOOKS_ENABLE=1 $(CURDIR)/$(BIN)/hatchling build -t wheel -d ..
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(COMPILED) build/fairgate-*.whl
	@touch $@

wheel: compiled  ## dist/: a wheel of compiled modules for this platform, one that runs anywhere, and the sources
	rm -rf dist && mkdir dist && cp build/fairgate-*.whl dist
	cd build/source && $(CURDIR)/$(BIN)/hatchling build -t sdist -t wheel -d $(CURDIR)/dist

test-install: wheel  ## installs each wheel into an empty environment by pip, pipx and uv, and asks for a first token
	FAIRGATE_TEST_WHEELS=$(CURDIR)/dist $(BIN)/pytest -q -rA -m wheels tests/install

release-check: $(INSTALLED)  ## is this commit fit to be released? All of CI among it, so it takes an hour
	PATH=$(CURDIR)/$(BIN):$$PATH bash .ci/release-check

docs: $(INSTALLED)  ## the site, in build/docs; a warning is an error. `make docs LINKS=1` also asks for every link to elsewhere
	$(BIN)/sphinx-build -q -W --keep-going docs build/docs
	$(if $(LINKS),$(BIN)/sphinx-build -q -b linkcheck docs build/linkcheck)

UPGRADE := --upgrade
lock: $(INSTALLED)  ## pin the newest versions that pyproject.toml allows, and of them what the image needs to run
	$(BIN)/uv pip compile $(UPGRADE) --extra dev --extra docs --extra jwt --extra opentelemetry --extra plots --extra tokenize --universal --generate-hashes \
	    --no-emit-index-url --no-annotate --no-header pyproject.toml -o requirements.lock
	$(BIN)/uv pip compile -c requirements.lock --universal --generate-hashes \
	    --no-emit-index-url --no-annotate --no-header pyproject.toml -o deploy/requirements.lock

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The sources are found where they are; `make test` installs them the usual way, by what builds wheels.
$(RUNS): deploy/requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fairgate needs Python 3.11 or later; try: make PYTHON=python3.12")'
	@echo "fairgate: installing the $$(grep -c == $<) packages that it runs on into $(VENV), once"
	@$(PYTHON) -m venv $(VENV)
	@said=$$($(BIN)/pip install --disable-pip-version-check --no-compile --require-hashes -r $< 2>&1) || { echo "$$said" >&2; exit 1; }
	@echo '$(CURDIR)' >"$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/fairgate.pth"
	@printf '#!/bin/sh\nexec "%s/python" -P -m gateway.commands.main "$$@"\n' '$(CURDIR)/$(BIN)' >$(BIN)/fairgate
	@chmod +x $(BIN)/fairgate && touch $@

$(INSTALLED): $(RUNS) requirements.lock pyproject.toml
	@echo "fairgate: installing what tests, checks and builds need into $(VENV), once"
	$(BIN)/pip install --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
