#!/usr/bin/env bash
# The slow way, kept as the baseline that benchmarks/extract.py measures against: tar and mv, one file
# after the other, every byte of the train set written twice. Use scripts/extract_ILSVRC_mp.py instead.
#
#   scripts/extract_ILSVRC.sh [FOLDER]     FOLDER (default: this one) holds ILSVRC2012_img_train.tar
#                                          and ILSVRC2012_img_val.tar, and valprep.sh for val/
set -euo pipefail

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,6s/^# \{0,1\}//p' "$0"
    exit 0
fi
folder=${1:-.}
cd "$folder" || { echo "error: no such folder: $folder; name the one with the tars" >&2; exit 2; }
folder=$PWD
train_tar=$folder/ILSVRC2012_img_train.tar
val_tar=$folder/ILSVRC2012_img_val.tar
if [[ ! -f $train_tar && ! -f $val_tar ]]; then
    echo "error: neither $(basename "$train_tar") nor $(basename "$val_tar") is in $folder; fetch them first" >&2
    exit 2
fi
for half in train val; do
    if [[ -e $folder/$half ]]; then
        echo "error: $folder/$half exists; remove it first" >&2
        exit 2
    fi
done

if [[ -f $train_tar ]]; then
    mkdir train
    tar -xf "$train_tar" -C train
    for class_tar in train/*.tar; do
        class=${class_tar%.tar}
        mkdir "$class"
        tar -xf "$class_tar" -C "$class"
        rm "$class_tar"
    done
    echo "train: $(find train -type f | wc -l) images"
fi

if [[ -f $val_tar ]]; then
    mkdir val
    tar -xf "$val_tar" -C val
    if [[ -f $folder/valprep.sh ]]; then # the lines are read, not run: `mv IMAGE CLASS/`
        while read -r command image class _; do
            [[ $command == mv ]] || continue
            mkdir -p "val/$class"
            mv "val/$image" "val/$class"
        done < "$folder/valprep.sh"
    else
        echo "warning: no valprep.sh in $folder: the images of val/ stay without class folders" >&2
    fi
    echo "val: $(find val -type f | wc -l) images"
fi
