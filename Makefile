# One command per wish; `make` alone lists them.
#
# Everything that is made goes into .venv (Python packages, and cmake or ninja if this machine has
# none) and build/PRESET (CMake presets of CMakePresets.json). A second run does only what is new.
#
# The Python packages are installed editable: nothing of them is copied, and no C is compiled by pip.
# `make library` builds build/release/libkestrel/libkestrel.so, and the loader of pykestrel looks
# there when it runs from a checkout. So after a change to C: make library. To try another build:
#     KESTREL_LIBRARY=build/debug/libkestrel/libkestrel.so .venv/bin/kestrel run "Hello"

ifndef PYTHON
PYTHON := $(shell command -v python3)
endif
BIN := .venv/bin
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

CTEST_ARGS ?=
PYTEST_ARGS ?=
FUZZ_SECONDS ?= 10
PROMPT ?= Say hello in one word.
C_FILES = $(shell find libkestrel tests bench -name '*.[ch]')

# Stamps: what .venv holds already.
CREATED := .venv/.created
RUNTIME := .venv/.runtime
DEV := .venv/.dev
TOOLS := .venv/.build-tools

.DEFAULT_GOAL := help
.PHONY: help venv library demo test test-all test-reference lint format bench bench-kernels debug asan tsan \
        aarch64 fuzz wheel dist-size clean distclean
.DELETE_ON_ERROR:

help: ## This list
	@echo "make demo first; it needs python3 (3.11 or newer) and a C compiler."
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/    make \1@\2/p' Makefile | awk -F@ '{printf "%-24s %s\n", $$1, $$2}'

# ---- what is installed --------------------------------------------------------------------------

$(CREATED):
	@[ -n "$(PYTHON)" ] || { echo "make: no python3 here. Debian, Ubuntu: apt-get install python3 python3-venv" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "make: $(PYTHON) is older than Python 3.11. If there is a newer one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "make: $(PYTHON) cannot make virtual environments. Debian, Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	"$(PYTHON)" -m venv .venv
	@touch $@

$(RUNTIME): pyproject.toml $(CREATED)
	$(BIN)/pip install -q -e .
	@touch $@

$(DEV): pyproject.toml $(RUNTIME)
	$(BIN)/pip install -q -e '.[dev]'
	@touch $@

# Presets need CMake 3.25.
$(TOOLS): $(CREATED)
	@command -v $${CC:-cc} >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || { \
	    echo "make: no C compiler here. Debian, Ubuntu: apt-get install gcc libc6-dev" >&2; exit 1; }
	@cmake --version 2>/dev/null | awk 'NR == 1 { split($$3, v, "."); ok = v[1] > 3 || (v[1] == 3 && v[2] >= 25) } \
	    END { exit !ok }' || { echo "cmake 3.25 or newer: from PyPI"; $(BIN)/pip install -q cmake; }
	@ninja --version >/dev/null 2>&1 || { echo "ninja: from PyPI"; $(BIN)/pip install -q ninja; }
	@touch $@

venv: $(DEV) $(TOOLS) ## Make .venv with everything the tests need

build/%/build.ninja: CMakePresets.json | $(TOOLS)
	@cmake --preset $* $(CMAKE_ARGS)

library: build/release/build.ninja ## Build libkestrel and kestrel-run in build/release
	@cmake --build build/release --target kestrel kestrel-run

# ---- what it does -------------------------------------------------------------------------------

demo: $(RUNTIME) library ## Ask the embedded model, then watch the answer under gdb
	@echo
	@echo '$$ kestrel run "$(PROMPT)"'
	@$(BIN)/kestrel run "$(PROMPT)"
	@echo
	@if command -v gdb >/dev/null; then \
	    echo '$$ debugkit trace -- kestrel run "$(PROMPT)"'; \
	    $(BIN)/debugkit trace -- $(BIN)/kestrel run "$(PROMPT)"; \
	else \
	    echo "gdb is not installed, so there is no trace to see. Debian, Ubuntu: apt-get install gdb"; \
	fi

test: $(DEV) build/release/build.ninja ## C tests (ctest) and Python tests (pytest)
	@cmake --build build/release
	@status=0; \
	ctest --preset release --output-log build/ctest.log $(CTEST_ARGS) || status=1; \
	$(BIN)/pytest $(PYTEST_ARGS) || status=1; \
	echo "ctest: $$(grep 'tests passed' build/ctest.log)"; \
	exit $$status

test-all: ## The same and the slow tests
	@$(MAKE) --no-print-directory test PYTEST_ARGS='-m "not reference" $(PYTEST_ARGS)'

test-reference: $(DEV) library ## The numpy oracle against transformers (downloads torch)
	$(BIN)/pip install -q -e '.[reference]'
	$(BIN)/pytest -m reference $(PYTEST_ARGS)

bench: $(RUNTIME) library ## Speed of a model, as a fraction of what this machine's memory allows
	@$(BIN)/kestrel bench $(BENCH_ARGS)

bench-kernels: build/release/build.ninja ## Speed of the matrix products alone
	@cmake --build build/release --target kernels_bench
	@build/release/bench/kernels_bench $(BENCH_ARGS)

# ---- other builds -------------------------------------------------------------------------------

debug: build/debug/build.ninja ## C tests, unoptimised, with internal checks
	@cmake --build build/debug
	@ctest --preset debug $(CTEST_ARGS)

tsan: build/tsan/build.ninja ## C tests with ThreadSanitizer
	@cmake --build build/tsan
	@ctest --preset tsan $(CTEST_ARGS)

# The Python tests that call into C, with the sanitized library in place of the other. Tests that run
# gdb, qemu or compilers are left out: the preloaded runtime would go into those as well. So is the
# sweep for equal bits, which asks nothing new of memory and would take most of an hour. What is freed
# stays in quarantine, 256 MB of it unless told: a test that watches resident memory would see it fill.
asan: $(DEV) build/asan/build.ninja ## C and Python tests with AddressSanitizer and UBSan
	@cmake --build build/asan
	@ctest --preset asan $(CTEST_ARGS)
	@ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=64 UBSAN_OPTIONS=print_stacktrace=1 \
	    LD_PRELOAD="$$($${CC:-cc} -print-file-name=libasan.so)" \
	    KESTREL_LIBRARY=$(CURDIR)/build/asan/libkestrel/libkestrel.so \
	    $(BIN)/python -m pytest -m "not gdb and not qemu and not slow and not reference" \
	    --ignore tests/python/test_invariance.py tests/python $(PYTEST_ARGS)

aarch64: build/aarch64/build.ninja ## Cross build for 64-bit ARM, C tests under qemu
	@cmake --build build/aarch64
	@ctest --preset aarch64 $(CTEST_ARGS)

fuzz: | $(TOOLS) ## Each parser under libFuzzer for FUZZ_SECONDS=10
	@cmake --preset fuzz -DKESTREL_FUZZ_SECONDS=$(FUZZ_SECONDS)
	@cmake --build build/fuzz
	@ctest --preset fuzz $(CTEST_ARGS)

wheel: $(CREATED) ## dist/pykestrel-*.whl for this machine
	$(BIN)/pip wheel -q --no-deps -w dist .
	@ls -l dist/*.whl

dist-size: build/release/build.ninja ## The stripped library, its debug file apart, and their sizes
	@cmake --build build/release --target dist
	@if [ -f build/aarch64/build.ninja ]; then cmake --build build/aarch64 --target dist; fi
	@wc -c build/*/dist/libkestrel.so*

# ---- the look of the source ---------------------------------------------------------------------

lint: $(DEV) ## ruff, mypy, clang-format, cppcheck, codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(C_FILES)
	$(BIN)/cppcheck --quiet --error-exitcode=1 --std=c11 --enable=warning,portability,performance \
	    --inline-suppr --suppressions-list=cmake/cppcheck.txt -Ilibkestrel/include -Ilibkestrel/src \
	    -Ilibkestrel/src/kernels libkestrel
	$(BIN)/codespell

format: $(DEV) ## Let ruff and clang-format rewrite what they can
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FILES)

clean: ## Remove what was built
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -exec rm -rf {} +

distclean: clean ## Remove .venv as well
	rm -rf .venv
