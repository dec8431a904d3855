#!/usr/bin/env bash
# compute-sanitizer over a small selection of tests: memcheck (reads and writes outside of
# allocations), then racecheck (hazards in shared memory). Exits nonzero when either finds something
# or a test fails.
#
#   tools/sanitize.sh [memcheck|racecheck|initcheck|synccheck ...]
#
# SELECTION: pytest's -k expression. SANITIZER: the tool's path. OUT: a folder for the logs.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-$(mktemp -d)}
sanitizer=${SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
if [[ ! -x $sanitizer ]]; then
  echo "sanitize: compute-sanitizer is missing: it comes with the CUDA toolkit; set SANITIZER" >&2
  exit 2
fi

# Allocations of their own instead of torch's pool: an access just outside of a tensor is caught.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
selection=${SELECTION:-"test_sanitized"}
tools=("$@")
[[ ${#tools[@]} -gt 0 ]] || tools=(memcheck racecheck)

status=0
for tool in "${tools[@]}"; do
  start=$SECONDS
  echo "sanitize: $tool"
  result=passed
  # Our kernels alone: those of the reference in the same process are not ours to judge.
  "$sanitizer" --tool "$tool" --error-exitcode 1 --kernel-regex kns=flashattn \
    "$python" -m pytest tests --devices=cuda -q -k "$selection" -p no:cacheprovider 2>&1 |
    tee "$out/$tool.txt" || { result=FAILED; status=1; }
  grep -q "ERROR SUMMARY: 0 errors\|RACECHECK SUMMARY: 0 hazards" "$out/$tool.txt" ||
    { result=FAILED; status=1; }
  echo "sanitize: $tool $result in $((SECONDS - start)) s"
done
exit "$status"
