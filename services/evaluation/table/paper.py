"""Tables 3 and 4 of the paper, which report.py shows beside a table of exact match."""

METHODS = """\
| method | HotpotQA | 2Wiki | MuSiQue | average |
|---|---|---|---|---|
| Base Tool Call | .1372 | .0891 | .0277 | .0847 |
| Naive RAG | .1916 | .1792 | .0277 | .1328 |
| PPO | .4136 | .5468 | .1552 | .3719 |
| GRPO | .4405 | .5741 | .1485 | .3877 |
| REINFORCE++ | .3768 | .4796 | .1336 | .3300 |
| REINFORCE++Baseline | .3966 | .5406 | .1485 | .3619 |
| RLOO | .4089 | .5641 | .1419 | .3716 |"""
ABLATION = """\
| method | loss mask | advantage mask | HotpotQA | 2Wiki | MuSiQue | average |
|---|---|---|---|---|---|---|
| PPO | yes | yes | .4136 | .5468 | .1552 | .3719 |
| PPO | yes | no | .3630 | .4641 | .1138 | .3136 |
| PPO | no | no | .3429 | .4631 | .1005 | .3022 |
| GRPO | yes | n/a | .4405 | .5741 | .1485 | .3877 |
| GRPO | no | n/a | .4260 | .5485 | .1422 | .3722 |"""
WORDS = """\
Exact match as printed in tables 3 and 4 of [arXiv:2511.14460](https://arxiv.org/abs/2511.14460) v1:
Qwen2.5-3B-Instruct, search over KILT, 51,200 training questions, no seeds or intervals reported.
This project used another model, other questions and another search: compare only the order of rows.
The paper's average is over all three columns."""
