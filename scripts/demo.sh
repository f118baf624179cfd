#!/bin/bash
# The tour of `make demo`: a fake ImageNet, extracted, trained on by 1 and then by 2 processes, and what came out of it;
# then the same data over a slow link, fetched first and streamed. A second call finds what the first one made.
# ARCH=resnet50 takes about three times as long; DEMO_REPEATS=3 trains each size three times, with three seeds.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
arch=${ARCH:-resnet18}
data=${DEMO_DATA:-demo}
records=${DEMO_RECORDS:-run_results/cpu/demo-$arch}
report=${DEMO_REPORT:-report.html}
classes=${DEMO_CLASSES:-10} train_per_class=${DEMO_TRAIN_PER_CLASS:-100} epochs=${DEMO_EPOCHS:-3} size=${DEMO_SIZE:-500x375}
repeats=${DEMO_REPEATS:-1} link_s=${DEMO_LINK_SECONDS:-15}

step() { printf '\n== %s\n' "$*"; }

step "1 of 5: a fake ImageNet of $classes classes -> $data"
"$python" scripts/make_fake_imagenet.py --out "$data" --classes "$classes" --train-per-class "$train_per_class" \
    --val-per-class 20 --size "$size"

step "2 of 5: extract it -> $data/train and $data/val"
"$python" scripts/extract_ILSVRC_mp.py --train_tar "$data/ILSVRC2012_img_train.tar" \
    --val_tar "$data/ILSVRC2012_img_val.tar" --output_dir "$data" --valprep_script "$data/valprep.sh" \
    --num_threads 2 --run_type all

step "3 of 5: $arch at 64 pixels, $epochs epochs on 1 and on 2 processes of one thread each -> $records"
"$python" scripts/scaling_study.py "$data" --gpus 1,2 --cluster local --weak --repeats "$repeats" --out "$records" -- \
    --arch "$arch" --batch-size 32 --epochs "$epochs" --image-size 64 --device cpu --threads 1 --workers 0

step "4 of 5: the report -> $report"
"$python" scripts/report.py "$records" "$data" --out "$report" --title "Trainyard demo"
"$python" - "$records" <<'PYTHON'
import json, os, pathlib, sys

wanted = float(os.environ.get("DEMO_TIMES_CHANCE", 3))
is_learning = True
for path in sorted(pathlib.Path(sys.argv[1]).glob("*/run.json")):
    run = json.loads(path.read_text())
    accuracy, chance = run["result"]["final_acc1"], 100 / run["dataset"]["num_classes"]
    is_learning &= accuracy >= wanted * chance
    processes = "1 process" if run["world_size"] == 1 else f"{run['world_size']} processes"
    print(f"{processes}: validation accuracy {accuracy:.1f} %, {accuracy / chance:.1f} times chance")
sys.exit(None if is_learning else f"error: the network did not learn: its accuracy is below {wanted:g} times chance")
PYTHON

step "5 of 5: the training tar over a link that takes $link_s s for it: fetched first, then streamed"
tar=ILSVRC2012_img_train.tar
work=$(mktemp -d)
"$python" scripts/index_tar.py --checksums "$data/$tar"
"$python" benchmarks/slow_server.py "$data" --file "$tar" --seconds "$link_s" >"$work/url" &
server=$!
trap 'kill "$server" 2>/dev/null || true; rm -rf "$work"' EXIT
until [[ -s $work/url ]]; do
    kill -0 "$server" || exit 1
    sleep 0.1
done
for stream in never always; do
    "$python" -m train "$(<"$work/url")/$tar" --stream "$stream" --data-dir "$work/$stream" --output "$work/run-$stream" \
        --arch "$arch" --batch-size 8 --epochs 1 --max-steps 2 --image-size 64 --device cpu --threads 1 --workers 0
done
"$python" - "$work" <<'PYTHON'
import json, pathlib, sys

for stream, words in (("never", "whole tar first"), ("always", "streamed")):
    (attempt,) = json.loads((pathlib.Path(sys.argv[1]) / f"run-{stream}/run.json").read_text())["attempts"]
    print(f"{words}: first step {attempt['time_to_first_step_s']:.1f} s after the start")
PYTHON
