#!/bin/bash
# Submits a job to the coordinator, places workers for it, waits for its end, and drains the workers.
#
#   QUERN_FARM=/shared/quern SBATCH_ARRAY_INX=0-15 run.sh /models/Laguna-S -o /models/Laguna-S-W4 --scheme W4A16_ASYM --group-size 32
#
# The arguments are those of quern submit; sbatch reads its own from SBATCH_* in the environment. Exits as the job does.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export QUERN_FARM=${QUERN_FARM:-$here}
# shellcheck source=/dev/null
source "$QUERN_FARM/farm.env"
export QUERN_SERVER

# shellcheck disable=SC2206  # flags are words
flags=(${QUERN_CLIENT_FLAGS:-})

job=$(quern submit "${flags[@]}" "$@" --detach)
array=$(sbatch --parsable "$here/workers.sbatch")
echo "$job, workers in Slurm's job $array" >&2
drain() {
  scancel --quiet --state=PENDING "$array" || true
  scancel --quiet --batch --signal=TERM "$array" || true
}
trap drain EXIT
trap 'exit 1' INT TERM
quern watch "${flags[@]}" "$job"
