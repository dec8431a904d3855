#!/usr/bin/env bash
# The benchmarks on this machine's GPU: $OUT/<preset>.json and the tables on stdout. Run it on a
# build that exists; it builds nothing.
#
#   OUT=/tmp/out tools/gpu_bench.sh [preset ...]          (default: host h200)
#
# PEERS (default "fa2,cudnn"), BUDGET (default 150): the seconds that h200 may take; the other
# presets get SHORT_BUDGET (default 20) each. FLASHATTN_COMMIT names the commit where the tree has
# no git history. PYTHON: the interpreter. FILTER: only cells with this text in their name.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:?set OUT to a folder for the results}
python=${PYTHON:-python3}
presets=("$@")
[[ ${#presets[@]} -gt 0 ]] || presets=(host h200)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

nvidia-smi --query-gpu=name,driver_version,power.limit,clocks.sm,temperature.gpu --format=csv || true
"$python" - <<'PY'
import torch

import flashattn

assert torch.cuda.is_available(), "no CUDA device here"
print("torch", torch.__version__, "cuDNN", torch.backends.cudnn.version())
print("flashattn", flashattn.build_info())
PY

status=0
for preset in "${presets[@]}"; do
  budget=${SHORT_BUDGET:-20}
  [[ $preset != h200 ]] || budget=${BUDGET:-150}
  start=$SECONDS
  printf '\n== %s\n' "$preset"
  peers=${PEERS:-fa2,cudnn}
  [[ $preset != host ]] || peers=sdpa,$peers # what a user calls: torch chooses
  "$python" benchmarks/run.py --preset "$preset" --peers "$peers" \
    --budget "$budget" --filter "${FILTER:-}" --json "$out/$preset.json" || status=1
  echo "$preset took $((SECONDS - start)) s"
done
exit "$status"
