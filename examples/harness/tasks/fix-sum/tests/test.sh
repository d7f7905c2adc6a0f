# Half of the reward for three numbers, half for none.
reward=0
[ "$(python3 total.py 1 2 3)" = 6 ] && reward=0.5
[ "$(python3 total.py 1 2 3)" = 6 ] && [ "$(python3 total.py)" = 0 ] && reward=1.0
echo $reward > "$VERIFIER_LOGS/reward.txt"
