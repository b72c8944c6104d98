# Thin: each target calls one script. `make demo` and `make test` do all the set-up on a fresh Debian 12.
JOBS ?= 2
export JOBS

.PHONY: demo test soak bench format build deps package

demo: build
	tests/demo.sh build/release

test: deps
	tests/run.sh

soak: build
	tests/soak.sh

bench: build
	tests/bench/run.sh

build: deps
	cmake --preset release
	cmake --build --preset release

deps:
	deploy/install_deps.sh

format:
	git ls-files '*.h' '*.cc' | xargs clang-format -i

# The Debian package, in build/release.
package: build
	cd build/release && cpack -G DEB
