#!/usr/bin/env bash
# `make soak`: what is too long for every change. Prints commit, seed and the result of each stage; docs/testing.md holds the last one.
# SEED=N repeats a run.
set -uo pipefail
cd "$(dirname "$0")/.."
jobs=${JOBS:-2}
seed=${SEED:-$RANDOM}
failed=0
echo "soak: commit $(git rev-parse --short HEAD), seed $seed"

stage() {
  local name=$1 start=$SECONDS
  shift
  if "$@" >"soak-$name.log" 2>&1; then
    echo "$name: ok, $((SECONDS - start)) s: $(tail -n 1 "soak-$name.log")"
    rm -f "soak-$name.log"
  else
    echo "$name: FAILED, $((SECONDS - start)) s, see soak-$name.log"
    failed=$((failed + 1))
  fi
}

sanitized() {  # sanitized PRESET BUILD-DIRECTORY CMAKE-ARGUMENTS...
  cmake --preset "$1" -B "$2" "${@:3}" && cmake --build "$2" --parallel "$jobs" &&
    ctest --test-dir "$2" -L unit --output-on-failure --no-tests=error -j "$jobs"
}

fuzz() {  # each target for five minutes, two at a time
  local status=0
  ls build/asan-ubsan/tests/fuzz/*_fuzzer | xargs -P "$jobs" -I{} sh -c '
    mkdir -p build/fuzz/$(basename {}) &&
    {} -max_total_time=300 -seed='"$seed"' -rss_limit_mb=2048 build/fuzz/$(basename {}) tests/fuzz/corpus/$(basename {} _fuzzer) >build/fuzz/$(basename {}).log 2>&1 ||
    { tail -n 40 build/fuzz/$(basename {}).log; exit 255; }' || status=1
  return $status
}

stage kills python3 tests/crash/kill_test.py --bin build/release --source tests/data/laguna-micro --runs 100 --seed "$seed"
stage chaos python3 tests/chaos/chaos_test.py --bin build/release --source tests/data/laguna-micro --runs 500 --seed "$seed"
stage asan-ubsan sanitized asan-ubsan build/asan-ubsan -DQUERN_LIBRARIES_ONLY=OFF
stage fuzz fuzz
stage tsan sanitized tsan build/tsan -DQUERN_LIBRARIES_ONLY=ON
stage memory python3 tests/crash/memory_test.py --bin build/release --layers 3
stage bench tests/bench/run.sh
echo "soak: $failed stages failed"
exit $((failed > 0))
