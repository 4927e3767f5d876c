#!/usr/bin/env bash
# Fine-tunes a public T5 1.1 checkpoint with t5x.train, to MODELS/TASK_SIZE.
#
#   MODELS=gs://bucket/models scripts/t5x/finetune.sh SIZE TASK [further flags of t5x.train]
#
# SIZE: small, base, large, xl, xxl. TASK: ende, cnn_dailymail. TFDS_DATA_DIR: where the data are prepared, gs:// with
# several hosts. NUM_PARTITIONS: chips a model is spread over; as gin/t5x/partitioning.gin counts, 2 for xl, 8 for xxl.
# On several hosts: the same command on each (see setup_tpu_vm.sh), with MULTI_HOST=1, which passes the flag by which
# t5x.train calls jax.distributed.initialize. Its name says GPU; on TPU VMs the hosts find each other without addresses.
# A run that was killed goes on when started again.
set -euo pipefail
usage='usage: MODELS=gs://bucket/models finetune.sh SIZE TASK'
size=${1:?$usage} task=${2:?$usage} models=${MODELS:?$usage}
shift 2
cd "$(dirname "$0")/../.."
case $size in xl) partitions=2 ;; xxl) partitions=8 ;; *) partitions=1 ;; esac

exec "${PYTHON:-.venv-t5x/bin/python}" -m t5x.train \
    --gin_file="gin/t5x/t5_1_1_$size.gin" \
    --gin_file="configs/t5x/finetune_$task.gin" \
    --gin.MODEL_DIR="'$models/${task}_$size'" \
    --gin.NUM_PARTITIONS="${NUM_PARTITIONS:-$partitions}" \
    ${MULTI_HOST:+--multiprocess_gpu} ${TFDS_DATA_DIR:+--tfds_data_dir="$TFDS_DATA_DIR"} "$@"
