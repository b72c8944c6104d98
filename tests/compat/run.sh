#!/usr/bin/env bash
# Runs the compatibility tests against a build directory in the oracle's environment: tests/compat/run.sh BUILD [pytest arguments].
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export QUERN_BUILD=$(cd "$1" && pwd)
shift
env=$("$here/setup_env.sh" | tail -n 1)
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=1
exec "$env/bin/python" -m pytest -q -p no:cacheprovider "$here" "$@"
