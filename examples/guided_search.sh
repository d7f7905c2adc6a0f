#!/bin/sh
# Train three agents of an example, learn what their turns are worth, fit how to search with that, and
# compare ways to decode. From the repository root: `sh examples/guided_search.sh deep_world`, or
# `lookahead`. What is finished is kept: start it again to continue. Of questions that are reported,
# nothing is asked before the last command.
set -eu
example="examples/$1"
runs="runs/$1/decoding"
data="$example/data"
[ -d "$data" ] || .venv/bin/python "$example/generate.py" --seed 0 --out "$data" --no-sft
agent="$example/decoding_agent.toml"
[ -f "$agent" ] || agent="$example/run.toml"
only="--set evaluation.sets={} --set" # tables of options are joined, so those of run.toml go first
development="diagnose.sets=[\"development\"] --set evaluation.sets.development=$data/eval_development.jsonl"
training="diagnose.sets=[\"train\"] --set evaluation.sets.train=$data/train.jsonl --set evaluation.temperature=1"
learn_values() { # folder, files of continued turns
    .venv/bin/agent-r1 train-reward "$example/turn_values.toml" --set run.seed="$seed" \
        --set model.path="\"$(ls -d "$run"/checkpoints/step_*/model | tail -1)\"" \
        --set train_reward.trajectories="[$2]" --set train_reward.output="$1"
}
led_by() { # folder of a model
    echo "--set reward.components.reward_model=0.0 --set reward.servers.reward_model.path=$1 --set reward.servers.reward_model.model=turn-values"
}
evaluate() { # options
    .venv/bin/agent-r1 evaluate "$example/run.toml" --policy "$run" --decode value_guided "$@"
}
continued="--decode-lookahead 0 --decode-candidates 8 --decode-continuations 4"
for seed in 0 1 2; do
    run="$runs/ppo_seed$seed" turns="$runs/turns_seed$seed.jsonl" searched="$runs/searched_seed$seed.jsonl"
    values="$runs/turn_values_seed$seed" first="$runs/first_values_seed$seed"
    # --resume of a finished run ends at once. Status 3: it is finished, with losses that were named.
    if [ -f "$run/config.json" ]; then
        .venv/bin/agent-r1 train --resume "$run" || [ $? -eq 3 ]
    else
        .venv/bin/agent-r1 train "$agent" --run-dir "$run" --set run.seed="$seed" $only $development ||
            [ $? -eq 3 ]
    fi
    # What turns are worth: first in states that the agent comes to, then in states that a search
    # comes to which is led by what was learned from those.
    if [ ! -d "$values" ]; then
        evaluate --out "$turns" $continued --decode-beta 0 $only $training \
            --set evaluation.max_questions=1000
        [ -d "$first" ] || learn_values "$first" "\"$turns\""
        evaluate --out "$searched" $continued --decode-beta 4 $only $training \
            --set evaluation.max_questions=500 --set run.seed=1 $(led_by "$first")
        learn_values "$values" "\"$turns\", \"$searched\""
    fi
    if [ ! -f "$run/decoding.json" ]; then
        evaluate --out "$runs/fit_seed$seed.jsonl" --decode-fit 0.5 1.0 $(led_by "$values") \
            $only $development --set evaluation.max_questions=400
    fi
done
exec .venv/bin/agent-r1 matrix "$example/decoding.toml"
