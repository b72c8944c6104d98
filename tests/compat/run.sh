#!/usr/bin/env bash
# Runs the compatibility tests against a build directory in the oracle's environment: tests/compat/run.sh BUILD [pytest arguments].
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export QUERN_BUILD=$(cd "$1" && pwd)
shift
env=$("$here/setup_env.sh" | tail -n 1)
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=1
pytest() { "$env/bin/python" -m pytest -q -p no:cacheprovider "$@"; }
if [[ $# -gt 0 ]]; then
  pytest "$here" "$@"
  exit
fi
# All of them, in two sessions side by side: torch has little to do in each and no need of more than a thread.
export OMP_NUM_THREADS=1
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# Those that run llm-compressor, and those for which weights are made by hand: about half of the time.
first=("$here"/test_{parity,loading,model_free,exports,unusual,unknown_types}.py)
pytest "${first[@]}" >"$log" 2>&1 &
status=0
pytest "$here" "${first[@]/#/--ignore=}" || status=1
wait $! || status=1
cat "$log"
exit $status
