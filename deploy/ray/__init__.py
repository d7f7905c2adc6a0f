"""A run on a Ray cluster, which places, restarts and scales what `agent-r1 serve` does.

up.py --HTTP--> Serve: serve.py, a replica for each rollout server, reward worker and tool instance
      --HTTP--> a Ray job: learner.py, an actor for each rank

Each replica and each rank is the ordinary process (process.py). Samples, weights and calls travel
as they do without Ray, over Redis and addresses that the services announce. No other package
imports ray.
"""
