#!/usr/bin/env bash
# Sets up all hosts of a Cloud TPU VM: a virtual environment with JAX for TPU, t5x, the T5 tasks, and this package.
#
#   gcloud alpha compute tpus tpu-vm create NAME --zone=ZONE --accelerator-type=v4-8 --version=tpu-ubuntu2204-base
#   scripts/t5x/setup_tpu_vm.sh NAME ZONE
#
# Run on your own machine, from a clone, with gcloud logged in. The clone goes to ~/specdec_jax on each host, the
# environment to ~/specdec_jax/.venv-t5x. T5X_COMMIT: of t5x, which makes no releases.
#
# Then, the same command on each host (a v4-8 has one, a v4-16 two): each starts one process, and they find each other
# through the TPU VM's metadata.
#   gcloud alpha compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all \
#     --command='cd specdec_jax && MODELS=gs://bucket/models TFDS_DATA_DIR=gs://bucket/tfds \
#                scripts/t5x/finetune.sh small ende'
# With more than one host MULTI_HOST=1 too. The data are prepared before, once: see table2.sh's STAGES=data.
set -euo pipefail
name=${1:?usage: setup_tpu_vm.sh NAME ZONE} zone=${2:?usage: setup_tpu_vm.sh NAME ZONE}
cd "$(dirname "$0")/../.."
commit=${T5X_COMMIT:-cc342d419ec3e3e9c4bf1df33c82330cafdc1e16} # the one that was tested

archive=$(mktemp)
trap 'rm -f "$archive"' EXIT
git archive --format=tar.gz --output="$archive" HEAD # what is committed
gcloud alpha compute tpus tpu-vm scp "$archive" "$name:specdec_jax.tar.gz" --zone="$zone" --worker=all

# t5x and t5 are installed without their dependencies: t5x asks for flax, optax and others from their git heads, where
# released versions work, and of t5 only the tasks are used. airio and jestimator, which t5x imports, are in git alone.
remote="set -euo pipefail
mkdir -p specdec_jax && tar -xzf specdec_jax.tar.gz -C specdec_jax
command -v python3.11 >/dev/null || {
  sudo add-apt-repository -y ppa:deadsnakes/ppa
  sudo apt-get update && sudo apt-get install -y python3.11 python3.11-venv
}
[ -d t5x ] || git clone https://github.com/google-research/t5x
git -C t5x checkout --quiet '$commit'
cd specdec_jax && python3.11 -m venv .venv-t5x && . .venv-t5x/bin/activate
pip install --upgrade pip
pip install --editable '.[tpu]'
pip install seqio tensorflow-cpu tensorflow-text tensorflow-datasets clu fiddle grain tensorboard cached_property chex \
  babel editdistance immutabledict nltk pandas rouge-score sacrebleu scikit-learn scipy
pip install --no-deps t5 --editable ../t5x \
  'airio @ git+https://github.com/google/airio' \
  'jestimator @ git+https://github.com/google-research/jestimator'
python -c 'import t5.data.tasks, t5x.infer, specdec_jax; import jax; print(jax.local_devices())'"
gcloud alpha compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$remote"
