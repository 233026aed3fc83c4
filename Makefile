# Each target is one script; CI calls the same. The first one installs into .venv.
.PHONY: help demo test test-cpus test-eval test-versions test-serve check size docs bench dist clean
ARGS ?=

help:  ## what there is
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile

demo:  ## compress a real model's cache with every method: table, picture, report (ARGS="--help")
	@scripts/demo $(ARGS)

test:  ## the test suite (ARGS="-k octopus")
	@scripts/test $(ARGS)

test-cpus:  ## bytes and published numbers once more, without the processor's vector instructions
	@scripts/test-cpus $(ARGS)

test-eval:  ## install lm-evaluation-harness and run its tests
	@scripts/test-eval $(ARGS)

test-versions:  ## what rests on transformers, with other versions than the locked one (ARGS="5.18.0")
	@scripts/test-versions $(ARGS)

test-serve:  ## install vLLM for the CPU into .venv-serve and run the tests in it
	@scripts/test-serve $(ARGS)

check:  ## lint, format, types
	@scripts/check

size:  ## lines and bytes of each area beside its limit (pyproject.toml, tool.size)
	@python3 scripts/size.py

docs:  ## render the tables and build the site, any warning an error (ARGS="--build": the site alone)
	@scripts/docs $(ARGS)

bench:  ## times of encode, decode and attention on this machine (ARGS="--help")
	@scripts/bench $(ARGS)

dist:  ## build the wheel and check what is in it
	@scripts/dist

clean:  ## remove .venv, caches and builds
	rm -rf .venv .venv-serve .venv-versions .venv-pythons dist build site .pytest_cache .mypy_cache .ruff_cache .hypothesis
