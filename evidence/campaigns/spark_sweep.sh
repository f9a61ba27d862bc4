#!/usr/bin/env bash
# Six trials of the lab, 20 steps each, as one would try them night by night: what each tries is written down before it starts.
#   bash evidence/campaigns/spark_sweep.sh runs/spark_sweep
# A trial that has ended with a row is not repeated; the table becomes KNOWLEDGE.md at the end.
set -uo pipefail
dir=${1:?the folder of the runs}
command=${VERL_CREDIT:-verl-credit}

trial() { # name, hypothesis, expected change, overrides
  local name=$1 hypothesis=$2 expected=$3
  shift 3
  if [ -f "$dir/lineage/results.tsv" ] && cut -f1 "$dir/lineage/results.tsv" | grep -qx "$name"; then return; fi
  "$command" train --config-name lab "run_dir=$dir/$name" trainer.total_training_steps=20 trainer.test_freq=10 \
    "lineage.hypothesis='$hypothesis'" "lineage.expected_delta='$expected'" "$@"
}

mode=algorithm.info_gain_norm_mode
trial grpo 'The outcome alone: what turn credit has to beat' '' $mode=none
trial joint 'Gains and outcomes on one scale: every search is compared with all others of its question' '+0.02' $mode=joint
trial separate 'Gains and outcomes each on their own scale' '+0.01' $mode=separate
trial turn-group 'A search is compared with the searches at the same position only' '+0.02' $mode=turn-group
trial v1d 'A2TGPO: turn groups, and a clip range that follows the gain of each turn' '+0.02' $mode=turn-group-v1d
# The lab evaluates in seconds; a limit of 3.6 s, first met after step 10, stands for an evaluation that does not fit its night.
trial v1d-alpha09 'Three times the weight on gains (alpha 0.9)' '+0.01' $mode=turn-group-v1d algorithm.adv_rescale_alpha=0.9 \
  evaluation.max_hours=0.001 trainer.val_before_train=false
"$command" lineage render --dir "$dir/lineage"
