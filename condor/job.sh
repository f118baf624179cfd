#!/bin/bash
# What runs in the slot: check, fetch (or train while the data arrives), train. Only a verified model is returned.
# condor/train.sub sets the environment.
#
# Exit codes: 0 done, 85 stopped with a checkpoint (HTCondor starts this script again), 75 this slot or the network
# failed (tried again elsewhere), 2 user error, 3 bad data, 4 diverged, 1 crash.
set -uo pipefail

mkdir -p out data # first of all: a listed output that does not exist is a hold
printf -v BEGAN '%(%s)T' -1 # the job's limit counts from here, the fetch included
export BEGAN PYTHONPATH=$PWD PYTHONUNBUFFERED=1
: "${WEIGHTS:=}" "${INDEX:=}" "${DATA:?}" "${EPOCHS:=5}" "${SEED:=0}" "${CHECKPOINT_HOURS:=2}" "${TRAIN:=}" "${FETCH:=}" "${PLUGIN:=false}" "${DATA_MODE:=tar}" "${STREAM:=auto}" "${CACHE_GB:=0}"
child='' stopping=''

on_term() {
    stopping=yes
    [[ -z $child ]] || kill -TERM "$child" 2>/dev/null
}
trap on_term TERM

# Runs a command that hears of a SIGTERM; returns its own exit code.
run() {
    [[ -z $stopping ]] || return 75
    "$@" &
    child=$!
    [[ -z $stopping ]] || kill -TERM "$child" 2>/dev/null
    local code=0 again
    while :; do
        wait "$child" && code=0 || code=$?
        kill -0 "$child" 2>/dev/null || break # else a signal ended the wait, not the command
    done
    wait "$child" 2>/dev/null && again=0 || again=$?
    [[ $again == 127 ]] || code=$again
    child=''
    return "$code"
}

# Leaves the slot; only a job that goes on here (85) keeps its data.
leave() {
    local code=$1
    if ((code > 128)); then
        echo "error: ended by signal $((code - 128)); try again" >&2
        code=75
    fi
    [[ $code == 85 ]] || rm -rf data
    exit "$code"
}

# Sets `python` to the first Python that can run the trainer, and `tried` to why the others cannot.
find_python() {
    local candidate why
    for candidate in ${PYTHON:+"$PYTHON"} python3 python /opt/conda/bin/python3 /usr/local/bin/python3 /usr/bin/python3; do
        if ! command -v "$candidate" >/dev/null; then
            why='not found'
        elif why=$("$candidate" slot.py has-torch 2>&1); then
            python=$candidate
            return
        fi
        why=${why##*$'\n'}
        tried+="${tried:+; }$candidate: ${why#error: }"
    done
}

python='' tried=''
find_python
if [[ -z $python ]]; then
    echo "error: no Python >= 3.10 with torch, torchvision, numpy and pillow here; choose another IMAGE or PYTHON (tried ${PYTHON:+PYTHON=}$tried)" >&2
    leave 2
fi

# An image of condor/trainyard.def has the JPEG kernel for a job that brings none. Its name has a digest of its source:
# one of another version is never loaded.
if [[ -n ${TRAINYARD_IMAGE:-} ]]; then
    for file in "$TRAINYARD_IMAGE"/train/data/{jpeg_crop-,libjpeg-}*.so*; do
        [[ ! -e $file || -e train/data/${file##*/} ]] || cp "$file" train/data/
    done
fi

way=$("$python" slot.py way) || leave $?
device=$("$python" slot.py check) || leave $?

case $DATA in
    dummy) source=(--dummy) ;;
    *://*) source=(data) ;;
    *) source=("$DATA") ;;
esac
# A source that is down for an hour here may be up elsewhere; the same command goes on where it stopped.
patience=(--give-up-after 1h ${FEDERATION:+--federation "$FEDERATION"})
if [[ $way == stream ]]; then # or, where that cannot be, the trainer fetches all of it first
    source=("$DATA" --data-dir data --stream "$STREAM" "${patience[@]}")
    source+=(${INDEX:+--index "${INDEX##*/}"})
    [[ $CACHE_GB =~ ^0*([.]0*)?$ ]] || source+=(--cache-limit "${CACHE_GB}GiB") # what slot.py has checked
elif [[ $PLUGIN == true ]]; then
    for url in ${DATA//,/ }; do # HTCondor put the files beside us; after an 85 they are where we put them
        [[ ! -e ${url##*/} ]] || mv "${url##*/}" data/
    done
elif [[ $DATA == *://* ]]; then
    read -r -a urls <<<"${DATA//,/ } $FETCH"
    run "$python" scripts/fetch_osdf.py --out data --record out "${patience[@]}" "${urls[@]}" || leave $?
fi
if [[ $DATA_MODE == extract && $DATA == *://* ]]; then
    run "$python" slot.py extract || leave $?
fi

read -r -a extra <<<"$TRAIN"
# A file that came along is what --pretrained looks for beside it; without that flag it is given by name.
if [[ -n $WEIGHTS && " $TRAIN " != *' --pretrained '* ]]; then
    extra+=(--weights "${WEIGHTS##*/}")
fi
limit=$("$python" slot.py deadline)
run "$python" -m train "${source[@]}" --output out --epochs "$EPOCHS" --seed "$SEED" --device "$device" --save-model \
    --checkpoint-minutes "$("$python" slot.py minutes)" ${limit:+--deadline "$limit"} ${extra[@]+"${extra[@]}"}
code=$?

# The model in out/ is returned only if run.json says that it was trained to the end.
"$python" slot.py verify "$code"
leave $?
