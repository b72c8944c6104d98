#!/usr/bin/env bash
# `make test`: every stage in turn, each with its time. A stage that fails does not hide the ones after it, except when nothing can
# be built. Exit status 0 only when all passed.
set -uo pipefail
cd "$(dirname "$0")/.."
jobs=${JOBS:-2}

names=() results=() seconds=()
failed=0

stage() {  # stage NAME COMMAND...
  local name=$1 start=$SECONDS result=ok
  shift
  echo "=== $name"
  "$@" || result=FAILED
  names+=("$name") results+=("$result") seconds+=($((SECONDS - start)))
  [[ $result == ok ]] || failed=$((failed + 1))
  [[ $result == ok ]]
}

summary() {
  echo "=== stages"
  for i in "${!names[@]}"; do printf '%-28s %-7s %4d s\n' "${names[$i]}" "${results[$i]}" "${seconds[$i]}"; done
  printf 'stages: %d passed, %d failed\n' $((${#names[@]} - failed)) "$failed"
  exit $((failed > 0))
}

build() {  # build PRESET
  cmake --preset "$1" "${@:2}" >"build-$1.log" 2>&1 || { cat "build-$1.log"; return 1; }
  rm -f "build-$1.log"
  cmake --build --preset "$1" --parallel "$jobs"
}

run_ctest() {  # run_ctest PRESET ARGS...
  ctest --test-dir "build/$1" --output-on-failure --no-tests=error "${@:2}"
}

stage "release build" build release || summary
stage "unit" run_ctest release -L unit -j "$jobs"
stage "compat environment" tests/compat/setup_env.sh && stage "compat" run_ctest release -L compat
stage "crash" run_ctest release -L crash
stage "chaos" run_ctest release -L chaos
stage "deploy" run_ctest release -L deploy -j "$jobs"
stage "attack" run_ctest release -L security
stage "sanitizer build" build asan-ubsan -DQUERN_LIBRARIES_ONLY=ON &&
  { stage "fuzz corpus replay" run_ctest asan-ubsan -L fuzz_replay -j "$jobs"
    stage "ASan+UBSan unit" run_ctest asan-ubsan -L unit -j "$jobs"; }
summary
