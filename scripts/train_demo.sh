#!/usr/bin/env bash
# Makes the demonstration pair from text: vocabulary, target, three distilled drafts, packaged checkpoints, examples.
#
#   scripts/train_demo.sh ende.tsv.gz summ.tsv.gz RUN_DIR
#
# ende.tsv.gz: English, German, split, ...; summ.tsv.gz: description, one-line summary, split, ...
# A killed run goes on when started again. TARGET_MINUTES and DRAFT_MINUTES set how long training takes.
set -euo pipefail
ende=$1 summ=$2 run=$3
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
minutes=${TARGET_MINUTES:-146}
draft_minutes=${DRAFT_MINUTES:-10}
demo=${DEMO:-specdec_jax/data/demo}
mkdir -p "$run" "$demo"

[ -f "$run/vocabulary.model" ] || $python scripts/build_vocabulary.py \
    --ende="$ende" --summ="$summ" --output="$run/vocabulary.model" --num_pieces=4000

train() { # run, minutes, emb_dim, num_heads, mlp_dim, encoder layers, decoder layers, further flags
    $python scripts/train.py --ende="$ende" --summ="$summ" --vocabulary="$run/vocabulary.model" \
        --run_dir="$run/$1" --minutes="$2" --emb_dim="$3" --num_heads="$4" --head_dim=64 --mlp_dim="$5" \
        --num_encoder_layers="$6" --num_decoder_layers="$7" --validate_every=400 "${@:8}"
}
package() { $python scripts/package_demo.py checkpoint --run_dir="$run/$1" --output="$demo/$1"; }
newest() { find "$run/$1" -maxdepth 1 -name 'checkpoint_*' | sort -V | tail -n 1; }

train target "$minutes" 384 6 768 2 5
package target
target=$(echo "$demo"/target/checkpoint_*)
[ -f "$run/outputs.tsv" ] || $python scripts/write_outputs.py --checkpoint="$target" \
    --vocabulary="$run/vocabulary.model" --ende="$ende" --summ="$summ" --output="$run/outputs.tsv"

# Drafts learn the target's probabilities, of people's text and of what it writes itself. Each starts from the next larger
# model, from what of it fits: far ahead of random weights.
start=$target
for draft in "draft_large 384 6 640 1 1" "draft_medium 256 4 512 1 1" "draft_small 128 2 256 1 1"; do
    read -r name sizes <<<"$draft"
    # shellcheck disable=SC2086  # sizes are five words
    train "$name" "$draft_minutes" $sizes --init_from="$start" --distill_from="$target" \
        --pairs="$run/outputs.tsv" --pairs_rate=2 --warmup_steps=30 --peak_learning_rate=1e-3
    package "$name"
    start=$(newest "$name")
done
$python scripts/package_demo.py examples --ende="$ende" --summ="$summ" \
    --vocabulary="$run/vocabulary.model" --output="$demo"
