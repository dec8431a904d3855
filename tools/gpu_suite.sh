#!/usr/bin/env bash
# Runs the test suite on this machine's GPU and writes $OUT/summary.md (a row for
# tests/gpu/RESULTS.md), $OUT/pytest.txt (the whole log) and $OUT/junit.xml.
#
#   OUT=/tmp/out tools/gpu_suite.sh [arguments of pytest]
#
# DEVICES (default "cuda"): the devices that the tests run on; "cpu,cuda" is everything.
# FLASHATTN_COMMIT names the commit where the tree has no git history. PYTHON: the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:?set OUT to a folder for the results}
python=${PYTHON:-python3}
mkdir -p "$out"

card=$("$python" -c 'import torch; print(torch.cuda.get_device_name())') || {
  echo "gpu_suite: no CUDA device here" >&2
  exit 2
}
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -1 || true)
torch=$("$python" -c 'import torch; print(torch.__version__)')
commit=${FLASHATTN_COMMIT:-$(git describe --always --dirty 2>/dev/null || echo unknown)}

start=$SECONDS
status=0
"$python" -m pytest tests --devices="${DEVICES:-cuda}" --durations=15 -q \
  --junit-xml="$out/junit.xml" "$@" 2>&1 | tee "$out/pytest.txt" || status=$?
seconds=$((SECONDS - start))

"$python" - "$out" "$commit" "$card" "$torch, ${driver:-unknown}" "$seconds" <<'PY'
import sys
import xml.etree.ElementTree as xml

out, commit, card, versions, seconds = sys.argv[1:]
counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
for suite in xml.parse(f"{out}/junit.xml").getroot().iter("testsuite"):
    for name in counts:
        counts[name] += int(suite.get(name, 0))
failed = counts["failures"] + counts["errors"]
passed = counts["tests"] - failed - counts["skipped"]
cells = (commit, card, versions, "suite", passed, failed, counts["skipped"], seconds)
row = "| " + " | ".join(map(str, cells)) + " |\n"
with open(f"{out}/summary.md", "a") as file:
    file.write(row)
print(row, end="")
PY
exit "$status"
