#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Adapts SmolLM2 with LoRA and measures it as docs/adapting.md did: hours. Run again, it goes on where it was.
#
#   sh research/measure_adapted.sh build/lora offset parallel          # a folder, and the positions to train for
set -eu

folder=${1:?usage: sh research/measure_adapted.sh FOLDER POSITION...}
shift
PATH=$PWD/.venv/bin:$PATH
mkdir -p "$folder"
original=$(tessera model smollm2 | tail -n 1)
[ -d "$folder/documents" ] || {
    sh research/training_documents.sh "$folder/documents.new"
    mv "$folder/documents.new" "$folder/documents" # whole, or not there
}
[ -f "$folder/adapted/config.json" ] || tessera adapt "$original" --documents "$folder/documents" \
    --output "$folder/adapted" --work "$folder/work" --with lora --positions "$@" --steps 170

# A core for each half of the questions: two threads on one question are slower.
running=
for part in 1 2; do
    echo "answering half the questions: $folder/part-$part.log has the progress" >&2
    (
        answer() {
            OMP_NUM_THREADS=1 taskset -c $((part - 1)) python -m research.measure_contexts "$@" --part "$part/2" \
                --max-tokens 24 --threads 1
        }
        answer "$original" "$folder/original-$part.jsonl" --contexts full
        answer "$folder/adapted" "$folder/adapted-$part.jsonl" --contexts full "$@"
    ) 2>"$folder/part-$part.log" &
    running="$running $!"
done
for half in $running; do
    wait "$half" # a half that failed ends the script
done
python -m research.measure_contexts --table "$folder"/adapted-?.jsonl --against "$folder"/original-?.jsonl

cat docs/*.md docs/decisions/*.md >"$folder/plain.txt"
python research/measure_perplexity.py "$folder/plain.txt" "$original" "$folder/adapted"

python research/example_questions.py >"$folder/example.jsonl"
for model in "$original" "$folder/adapted"; do
    tessera eval "$model" --questions "$folder/example.jsonl" --modes full,parallel --max-tokens 32 \
        --output "$folder/in-place" --overwrite -- --chunk-cache-placement in-place --chunk-position-strategy parallel \
        --max-num-seqs 4
done
