"""The ranks of the learner: how they meet, what they are told, and how they end together.

In the order in which a start passes through them: rank_env.py (which rank is this process?),
rendezvous.py (have all come, with the same configuration?), join.py (the process group), group.py
(rank 0 gives commands) and worker.py (the others follow), wire.py and messages.py (what a command
is made of), engine.py (what every rank computes). heartbeat.py runs beside them until the end.
"""
