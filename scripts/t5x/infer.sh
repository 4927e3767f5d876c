#!/usr/bin/env bash
# Decodes a task's test set with t5x.infer, with a draft or without, as in the paper's Table 2.
#
#   MODELS=gs://bucket/models scripts/t5x/infer.sh TASK TARGET DRAFT TEMPERATURE GAMMA OUTPUT [t5x.infer's flags]
#   MODELS=gs://bucket/models scripts/t5x/infer.sh ende xxl small 0.0 7 out/ende_small_t0
#   MODELS=gs://bucket/models scripts/t5x/infer.sh ende xxl none 0.0 - out/ende_none_t0
#
# TASK: ende, cnn_dailymail. TARGET, DRAFT: sizes that finetune.sh trained; none: t5x's own decoder. OUTPUT, a local
# folder, gets t5x's results and config.gin, infer.log, and seconds: the whole launch's, start and compilation included.
# STEP: of the checkpoints (1020000). ONE_CHIP=1: one chip of the host alone, as in the paper.
# Several hosts, not tried: the same command on each, without ONE_CHIP; the TPU runtime has to join them, since t5x.infer
# has no flag for it. The first host's OUTPUT has the results.
set -euo pipefail
usage='usage: MODELS=gs://bucket/models infer.sh TASK TARGET DRAFT TEMPERATURE GAMMA OUTPUT'
task=${1:?$usage} target=${2:?$usage} draft=${3:?$usage} temperature=${4:?$usage} gamma=${5:?$usage} output=${6:?$usage}
models=${MODELS:?$usage} step=${STEP:-1020000}
shift 6
mkdir -p "$output"
output=$(cd "$output" && pwd)
cd "$(dirname "$0")/../.."

if [ "${ONE_CHIP:-0}" = 1 ]; then
    export TPU_VISIBLE_CHIPS=0 TPU_VISIBLE_DEVICES=0 TPU_PROCESS_BOUNDS=1,1,1 TPU_CHIPS_PER_PROCESS_BOUNDS=1,1,1
fi
flags=(--gin_file="gin/t5x/t5_1_1_$target.gin" --gin_file="configs/t5x/table2_$task.gin")
if [ "$draft" != none ]; then # all that speculation adds
    flags+=(--gin_file="gin/t5x/draft_t5_1_1_$draft.gin" --gin.GAMMA="$gamma"
        --gin.DRAFT_CHECKPOINT_PATH="'$models/${task}_$draft/checkpoint_$step'")
fi
SECONDS=0
"${PYTHON:-.venv-t5x/bin/python}" -m t5x.infer "${flags[@]}" \
    --gin.CHECKPOINT_PATH="'$models/${task}_$target/checkpoint_$step'" \
    --gin.TEMPERATURE="$temperature" \
    --gin.INFER_OUTPUT_DIR="'$output'" \
    ${TFDS_DATA_DIR:+--tfds_data_dir="$TFDS_DATA_DIR"} "$@" 2>&1 | tee -a "$output/infer.log"
echo "$SECONDS" >"$output/seconds"
