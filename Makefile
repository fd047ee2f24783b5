# `make demo` and `make test` need python3.11 (or newer) and nothing else: they make .venv by themselves.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed
# What the installation compiles.
NATIVE := $(wildcard native/*.c native/*.h native/*.py)
PROTOS := $(wildcard proto/shardline/rpc/v1/*.proto)
# protoc finds mypy-protobuf's plugins on PATH.
PROTOC = PATH="$(CURDIR)/$(BIN):$$PATH" python -m grpc_tools.protoc -I proto --python_out=$(1) \
	--grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)
# More for pytest: make test ARGS="-k cluster -x"
ARGS ?=

.PHONY: install proto proto-check docs docs-check site test-lessons fmt fmt-check lint type test test-processes test-long test-models test-launchers test-native native-sanitize native-try native-fuzz test-monitoring test-scripts test-versions wheel test-wheel test-all chaos chaos-quick chaos-e2e chaos-figures fuzz load e2e demo clean bench bench-quick bench-peers reproduce golden house way test-gpu bench-gpu
.DELETE_ON_ERROR:

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Shardline needs Python 3.11 or newer; name it: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv || \
		{ rm -rf .venv; echo "can't make .venv; on Debian: apt-get install python3-venv" >&2; exit 2; }
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,examples]'
	@$(BIN)/python -c 'from shardline.native.library import describe; print(describe())'
	@touch $@

proto: $(STAMP)
	$(call PROTOC,.)

# The stubs are generated once more, into a folder that goes away, and compared.
proto-check: $(STAMP)
	@new=$$(mktemp -d) && trap 'rm -rf "$$new"' EXIT && $(call PROTOC,"$$new") && \
	{ diff -r -x __init__.py -x __pycache__ "$$new/shardline/rpc/v1" shardline/rpc/v1 || \
		{ echo "the generated stubs are not what proto/ says; run: make proto" >&2; exit 1; }; }

docs: $(STAMP)
	$(BIN)/python -m shardline.observability.metrics > docs/metrics.md
	$(BIN)/python -m benchmarks.report > docs/results.md
	$(BIN)/python -m benchmarks.reproductions.page > docs/reproductions.md
	SHARDLINE_PLUGINS= $(BIN)/python -m shardline.methods > shardline/cli/methods.json
	SHARDLINE_PLUGINS= $(BIN)/python docs/make_combinations.py > docs/combinations.md
	$(BIN)/python deploy/grafana/make_dashboard.py > deploy/grafana/dashboards/shardline.json

docs-check: $(STAMP)
	@$(BIN)/python -m shardline.observability.metrics | diff docs/metrics.md - && \
	$(BIN)/python -m benchmarks.report | diff docs/results.md - && \
	$(BIN)/python -m benchmarks.reproductions.page | diff docs/reproductions.md - && \
	SHARDLINE_PLUGINS= $(BIN)/python -m shardline.methods | diff shardline/cli/methods.json - && \
	SHARDLINE_PLUGINS= $(BIN)/python docs/make_combinations.py | diff docs/combinations.md - && \
	$(BIN)/python deploy/grafana/make_dashboard.py | diff deploy/grafana/dashboards/shardline.json - || \
		{ echo "generated pages are not what their sources say; run: make docs" >&2; exit 1; }

# The pages as a site, in site/; fails at a link or an anchor that leads nowhere.
site: $(STAMP)
	@$(BIN)/python -c 'import mkdocs' 2>/dev/null || \
		$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

fmt: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

fmt-check: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP)
	$(BIN)/ruff check .

type: $(STAMP)
	$(BIN)/mypy

# Tests start hundreds of interpreters: none is to compile all modules again, whatever the environment says.
test test-processes test-long test-models test-all test-native test-launchers chaos chaos-quick chaos-e2e test-monitoring: export PYTHONDONTWRITEBYTECODE =

SHORT := not chaos and not bench and not long and not processes and not models and not wheel and not lessons
# Half of the time a test waits, so there are twice as many processes as the two cores that this is for. Tests that start
# whole clusters come after all others. With ARGS a part may select no test at all, which pytest reports as 5.
test: $(STAMP)
	$(BIN)/pytest -q -n 4 --dist loadfile -m "$(SHORT)" --ignore tests/e2e --ignore tests/monitoring tests $(ARGS) || \
		[ $$? = 5 -a -n "$(ARGS)" ]
	$(BIN)/pytest -q -n 3 --dist worksteal -m "$(SHORT)" tests/e2e $(ARGS) || \
		[ $$? = 5 -a -n "$(ARGS)" ]

# What needs a CUDA device, on a machine that has one; then steps of GPT-2 small beside plain torch.
test-gpu: $(STAMP)
	$(BIN)/pytest -q -m gpu tests $(ARGS)

bench-gpu: $(STAMP)
	$(BIN)/python -m benchmarks.gpu --out benchmarks/results/gpu.json $(ARGS)

# Its size, and signs of special cases in the middle; tests/unit/test_house.py has the bars.
house: $(STAMP)
	@$(BIN)/python -m tests.support.house

# The files that a gradient passes on its way to the servers and back.
way: $(STAMP)
	@$(BIN)/python -m tests.support.way 2>/dev/null

# The rest of those that start whole clusters of processes: what ends, dies, floods and is refused.
PROCESSES := tests/e2e tests/deploy tests/unit/test_launcher.py tests/unit/test_run_lock.py tests/integration/test_forkserver.py \
	tests/launchers/test_torchrun.py tests/launchers/test_tfjob.py
test-processes: $(STAMP)
	$(BIN)/pytest -q -n 3 --dist worksteal -m "processes and not chaos and not long" $(PROCESSES) $(ARGS) || \
		[ $$? = 5 -a -n "$(ARGS)" ]

# Launchers themselves: torchrun, Slurm, mpirun, sshd, Ray. What is not installed is left out, and named.
test-launchers: tests/launchers/.venv/.installed
	tests/launchers/.venv/bin/pytest -q -rs tests/launchers $(ARGS) || [ $$? = 5 -a -n "$(ARGS)" ]

# The rest of what those in one process try: every combination of methods, thousands of schedules of the protocol's model.
test-long: $(STAMP)
	$(BIN)/pytest -q -n 2 --dist loadfile --hypothesis-profile long -m "long and not chaos" tests $(ARGS) || [ $$? = 5 -a -n "$(ARGS)" ]

# Every model, batch and optimizer of the table in docs/jobs.md beside plain PyTorch, in all ways; make test tries a few.
test-models: $(STAMP)
	$(BIN)/pytest -q -n 4 tests/models $(ARGS) || [ $$? = 5 -a -n "$(ARGS)" ]

# The commands of docs/learn, in three minutes.
test-lessons: $(STAMP)
	$(BIN)/pytest -q -n 2 --dist worksteal --durations 6 tests/lessons $(ARGS) || [ $$? = 5 -a -n "$(ARGS)" ]

# The C library with ASan and UBSan under the tests of its kernels. Leaks are Python's own. Without libstdc++ beside it,
# ASan ends the process at torch's first C++ exception.
SANITIZED := runs/native-sanitized
native-sanitize: $(STAMP)
	$(BIN)/python native/build.py --sanitize $(SANITIZED)
	SHARDLINE_NATIVE=$(CURDIR)/$(SANITIZED)/libshardline.so ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$($${CC:-cc} -print-file-name=libasan.so) $$($${CC:-cc} -print-file-name=libstdc++.so.6)" $(BIN)/pytest -q -p no:cacheprovider tests/unit/test_native.py \
		tests/unit/test_native_codecs.py tests/unit/test_update_sgd.py tests/unit/test_rows.py tests/unit/test_engine.py tests/unit/test_bulk.py tests/unit/test_tls_socket.py $(ARGS)

# The suites of lanes, of exactness and of bad input without the C library and with it. CI runs them with it only. Levels of
# the processor: make test-native LEVELS="sse2 avx2"
LEVELS ?= 0 1
NATIVE_SUITES := tests/contract tests/integration/test_lanes.py tests/integration/test_equivalence.py \
	tests/integration/test_deaths.py tests/integration/test_zero_copy.py tests/integration/test_standbys.py \
	tests/conformance/test_lane.py tests/conformance/test_parcel_lane.py tests/conformance/test_codec.py \
	tests/conformance/test_codec_training.py tests/conformance/test_update_rule.py \
	tests/unit/test_native.py tests/unit/test_native_codecs.py tests/unit/test_update_sgd.py tests/unit/test_rows.py tests/unit/test_engine.py \
	tests/unit/test_bulk.py tests/unit/test_tls_socket.py tests/unit/test_segments.py tests/unit/test_window.py
test-native: $(STAMP)
	@for level in $(LEVELS); do echo "SHARDLINE_NATIVE=$$level"; \
		SHARDLINE_NATIVE=$$level $(BIN)/pytest -q -n 4 --dist loadfile -m "$(SHORT)" $(NATIVE_SUITES) $(ARGS) || exit 1; done

# The engine alone: random scripts under ASan and UBSan, then under TSan. With clang: make native-fuzz, a million of its inputs.
TRIALS := runs/native-trials
native-try: $(STAMP)
	$(BIN)/python native/build.py --trial address,undefined $(TRIALS)/asan && $(TRIALS)/asan 20000
	$(BIN)/python native/build.py --trial thread $(TRIALS)/tsan && $(TRIALS)/tsan 5000

native-fuzz: $(STAMP)
	CC=clang $(BIN)/python native/build.py --trial fuzzer,address,undefined $(TRIALS)/fuzz
	mkdir -p $(TRIALS)/corpus && $(TRIALS)/fuzz -runs=1000000 -max_len=300 -artifact_prefix=$(TRIALS)/ $(TRIALS)/corpus $(ARGS)

# What people look at: rules and dashboard against a real Prometheus, the chief's page in a real Chromium.
test-monitoring: $(STAMP)
	$(BIN)/pytest -q -n 2 --dist loadfile tests/monitoring $(ARGS) || [ $$? = 5 -a -n "$(ARGS)" ]

# Every Python on PATH with the newest libraries, one with the oldest that pyproject.toml allows; half an hour and more.
# make test-versions ARGS="--python /path/to/python3.14"
test-versions: $(STAMP)
	$(BIN)/python -m tests.versions $(ARGS)

# Training loops that people bring along (transformers, accelerate, lightning, peft), in an environment of their own.
test-scripts: tests/scripts/.venv/.installed
	tests/scripts/.venv/bin/pytest -q tests/scripts $(ARGS) || [ $$? = 5 -a -n "$(ARGS)" ]

tests/%/.venv/.installed: tests/%/requirements.txt pyproject.toml constraints.txt
	@test -x tests/$*/.venv/bin/pip || $(PYTHON) -m venv tests/$*/.venv
	tests/$*/.venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -r $<
	@touch $@

# In dist/: wheels for glibc 2.17 on x86-64 and aarch64, compiled by ziglang, and one without the C library for all others.
wheel: build/.venv/.installed
	rm -rf dist
	@for kind in any aarch64 x86_64; do \
		SHARDLINE_WHEEL=$$kind build/.venv/bin/pip wheel --quiet --disable-pip-version-check --no-deps -w dist . || exit 1; done
	@ls dist

# Installs the one for this machine, trains the digits with it, and lists what it was installed with (CycloneDX).
# Then tasks of a wheel of the version before and of this one take each other's places in a running job.
test-wheel: wheel $(STAMP)
	$(BIN)/pytest -q --basetemp build/test-wheel tests/wheel $(ARGS)
	$(BIN)/pytest -q -m wheel tests/e2e/test_upgrade.py
	build/.venv/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		-o dist/shardline.cdx.json build/test-wheel/environment0/venv

build/.venv/.installed: pyproject.toml constraints.txt
	@test -x build/.venv/bin/pip || $(PYTHON) -m venv build/.venv
	build/.venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt auditwheel cyclonedx-bom
	@touch $@

# Kills, pauses and cut links drawn from seeds, with real processes; about half a minute each. More:
# make chaos ARGS="--seed 17", or ARGS="--count 200"
chaos: $(STAMP)
	$(BIN)/python -m tests.chaos $(ARGS)

# The short, fixed part of it.
chaos-quick: $(STAMP)
	$(BIN)/pytest -q -n 2 --dist worksteal -m chaos tests/chaos $(ARGS) || [ $$? = 5 -a -n "$(ARGS)" ]

# Deaths in the middle of whole runs, one by one: servers, the chief, standbys, scripts. Five minutes.
chaos-e2e: $(STAMP)
	$(BIN)/pytest -q -m chaos tests/e2e $(ARGS) || [ $$? = 5 -a -n "$(ARGS)" ]

# 20 kills of each role: benchmarks/results/recovery.json
chaos-figures: $(STAMP)
	$(BIN)/python -m tests.chaos.figures $(ARGS)

# Ten thousand calls, a hundred thousand lies, thousands of things to load; minutes. More: make fuzz ARGS="--seed 7 --only calls"
fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz $(ARGS)

# 64 workers on one server for 10 minutes: benchmarks/results/load.json
load: $(STAMP)
	$(BIN)/python -m benchmarks.load $(ARGS)

# Where known jobs end, to the bit: for whoever moves code about. About ten minutes. More: make golden ARGS="--only killed"
golden: $(STAMP)
	$(BIN)/python -m tests.golden $(ARGS)

# With a real Docker engine and Compose v2; builds the image, about ten minutes. torch comes from wheelhouse/, from
# TORCH_INDEX_URL, or else as this machine's pip finds it, for the device that .venv's torch is built for.
e2e: $(STAMP)
	@test -n "$$SHARDLINE_E2E_IMAGE" -o -n "$$TORCH_INDEX_URL" -o -n "$$(find wheelhouse -name 'torch-*.whl')" || \
		$(BIN)/pip download --quiet --disable-pip-version-check --no-deps -c constraints.txt -d wheelhouse torch
	SHARDLINE_E2E=1 TORCH=$${TORCH:-$$($(BIN)/python -c 'import torch; print("cuda" if torch.version.cuda else "cpu")')} \
		$(BIN)/pytest -q --durations=5 tests/containers $(ARGS)

test-all: $(STAMP)
	$(BIN)/pytest -q --hypothesis-profile long tests $(ARGS)

demo: $(STAMP)
	rm -rf runs/demo
	$(BIN)/shardline train examples/digits/job.py --ps 2 --workers 2 --evaluators 1 --out runs/demo

# The bars of docs/benchmarks.md; peers that are not installed are left out and named. More: make bench BENCH="--only links"
BENCH ?=
bench: $(STAMP)
	$(BIN)/python -m benchmarks.run $(BENCH)

# Whether everything runs, in minutes; its figures mean nothing.
bench-quick: $(STAMP)
	$(BIN)/python -m benchmarks.run --quick --out runs/bench $(BENCH)

# What papers claim, tried small; half an hour. One of them: make reproduce REPRODUCE="--only R4"
REPRODUCE ?=
reproduce: $(STAMP)
	$(BIN)/python -m benchmarks.reproductions $(REPRODUCE)
	$(BIN)/python -m benchmarks.reproductions.page > docs/reproductions.md

# Each rival lives in a virtual environment of its own: their pins and ours need not agree.
bench-peers: $(addprefix benchmarks/.venvs/,$(addsuffix /.installed,tensorflow ray torch))

benchmarks/.venvs/%/.installed: benchmarks/peers/requirements-%.txt
	@test -x benchmarks/.venvs/$*/bin/pip || $(PYTHON) -m venv benchmarks/.venvs/$*
	benchmarks/.venvs/$*/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

clean:
	rm -rf .venv tests/*/.venv runs .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
