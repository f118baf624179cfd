#!/bin/bash
# What `make test-oldest` runs with the oldest Python and torch that we promise: fetch, index, train on one process,
# continue on two, evaluate. Usage: tests/oldest.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -c 'import sys, torch, numpy; print("Python", sys.version.split()[0], "torch", torch.__version__, "numpy", numpy.__version__)'

"$python" scripts/make_fake_imagenet.py --out "$work/source" --classes 3 --train-per-class 24 --val-per-class 6 --size 80x60
"$python" scripts/fetch_osdf.py --out "$work/data" "file://$work/source/ILSVRC2012_img_train.tar" \
    "file://$work/source/ILSVRC2012_img_val.tar" "file://$work/source/valprep.sh"
flags=(-a resnet18 -b 8 --image-size 32 --device cpu --threads 1 --epochs 2 --output "$work/run")
"$python" -m train "$work/data" "${flags[@]}" --max-steps 9
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 -m train "$work/data" "${flags[@]}" --save-model
"$python" -m train "$work/data" "${flags[@]}" -e
"$python" - "$work/run/run.json" <<'PYTHON'
import json, sys

run = json.load(open(sys.argv[1]))
assert (run["status"], run["images_trained"]) == ("done", 2 * 72), run
assert [attempt["ranks"] for attempt in run["attempts"]] == [1, 2], run["attempts"]
PYTHON
echo "test-oldest: all passed"
