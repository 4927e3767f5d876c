#!/usr/bin/env bash
# The paper's Table 2 with t5x: fine-tunes target and drafts, decodes both test sets with and without drafts, reports.
#
#   MODELS=gs://bucket/models TFDS_DATA_DIR=gs://bucket/tfds scripts/t5x/table2.sh OUTPUT
#   MODELS=... STAGES="infer report" scripts/t5x/table2.sh OUTPUT
#
# STAGES: those of "data finetune infer report" to go through; each finds what those before it left. Fine-tuning XXL
# takes a v4-16, on each of whose hosts STAGES=finetune MULTI_HOST=1 is started; the rest takes one host, and decodes on
# one of its chips. TARGET (xxl), DRAFTS ("small base large") and NUM_INPUTS (all) make it smaller. A finished inference
# is not repeated. RULE (token, the paper's) is how guesses are verified.
set -euo pipefail
output=${1:?usage: MODELS=gs://bucket/models table2.sh OUTPUT}
: "${MODELS:?usage: MODELS=gs://bucket/models table2.sh OUTPUT}"
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../../.venv-t5x/bin/python}
target=${TARGET:-xxl} drafts=${DRAFTS:-small base large}
tasks="ende cnn_dailymail"
stages=" ${STAGES:-data finetune infer report} "
for stage in $stages; do
    [[ " data finetune infer report " == *" $stage "* ]] || {
        echo "error: STAGES has $stage; it is of: data finetune infer report" >&2
        exit 1
    }
done
mkdir -p "$output"

gamma() { # of the paper's Tables 2 and 4, for a task, a draft and a temperature
    case $1-$2-$3 in
    ende-small-* | ende-base-0.0 | ende-large-0.0) echo 7 ;;
    cnn_dailymail-large-* | cnn_dailymail-base-1.0 | ende-large-1.0) echo 3 ;;
    *) echo 5 ;;
    esac
}
infer() { # task, draft, temperature, gamma
    local to=$output/$1_$2_gamma$4_t$3 rule=${RULE:-token}
    [ "$2" != none ] || rule=
    [ -f "$to/seconds" ] || ONE_CHIP=1 "$here/infer.sh" "$1" "$target" "$2" "$3" "$4" "$to" \
        ${rule:+--gin.RULE="'$rule'"} ${NUM_INPUTS:+--gin.SPLIT="'test[:$NUM_INPUTS]'"}
}

if [[ $stages == *" data "* ]]; then
    for dataset in wmt_t2t_translate/de-en:1.0.0 cnn_dailymail:3.4.0; do
        "$python" -c "import sys, tensorflow_datasets as tfds
tfds.builder(sys.argv[1], data_dir=sys.argv[2] or None).download_and_prepare()" "$dataset" "${TFDS_DATA_DIR:-}"
    done
fi
if [[ $stages == *" finetune "* ]]; then
    for task in $tasks; do
        for size in $drafts "$target"; do "$here/finetune.sh" "$size" "$task"; done
    done
fi
if [[ $stages == *" infer "* ]]; then
    for task in $tasks; do
        for temperature in 0.0 1.0; do
            infer "$task" none "$temperature" -           # t5x's own decoder
            infer "$task" "${drafts%% *}" "$temperature" 0 # the target alone, in the speculative program
            for draft in $drafts; do
                infer "$task" "$draft" "$temperature" "$(gamma "$task" "$draft" "$temperature")"
            done
        done
    done
fi
if [[ $stages == *" report "* ]]; then
    "$python" "$here/report.py" "$output"/*_t?.? >"$output/table2.md.new"
    mv "$output/table2.md.new" "$output/table2.md"
    cat "$output/table2.md"
fi
