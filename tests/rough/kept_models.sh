# Four stories of kept models, told with the code of a checkout: kept_models.sh FOLDER, in which .cache/typing/bsearch is a link to it.
export PYTHONPATH=$1/.cache/typing OMP_NUM_THREADS=1 RAY_USAGE_STATS_ENABLED=0
b() { ${PYTHON:-python} -m bsearch "$@"; }
W=$(mktemp -d); cd $W
study() { cat > $1.yaml <<Y
study: $1
task: bsearch.objectives.digits:Digits
space: {effective_batch: {low: 32, high: 256}, reference_rate: {low: 0.05, high: 0.2, at_batch: 64}, rule: sqrt, epochs: {low: 20, high: 40}}
budget: {by: $2, profile_s: 1, keep: $3}
Y
}
echo "== 1: a second run, refused, while the first is saving models"
study one 45s $W/m1
b run one.yaml --serial > first.txt 2>&1 & P=$!
for i in $(seq 60); do sleep 0.5; grep -q "trial 2" first.txt && break; done
b run one.yaml --serial > second.txt 2>&1; echo "second: rc $?: $(tail -1 second.txt | cut -c1-150)"
wait $P; echo "first: rc $?"; ls m1; 
echo "== 2: train --keep into a folder with files of mine"
mkdir mine; echo keep > mine/notes.txt; echo old > mine/model.pt
b train one.yaml --keep mine --serial > t.txt 2>&1; echo "rc $?: $(tail -1 t.txt | cut -c1-200)"; cat mine/notes.txt mine/model.pt | head -c 60
echo; echo "== 3: --keep on a mounted volume"
mkdir vol; if mount -t tmpfs none vol 2>/dev/null; then study three 25s $W/vol; b run three.yaml --serial > v.txt 2>&1; echo "rc $?: $(tail -1 v.txt | cut -c1-200)"; ls vol; umount vol; else echo "no mounts here"; fi
echo "== 4: two studies with one folder"
study four 25s $W/m1
b run four.yaml --serial > f.txt 2>&1; echo "rc $?"; grep -i "model\|keep\|folder" f.txt | tail -2 | cut -c1-220; b show one.yaml 2>/dev/null | grep -i model | head -2
rm -rf $W
