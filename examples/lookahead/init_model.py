"""Write the initialized model directory that the warm start trains: stock Qwen2, seeded.

    python examples/lookahead/init_model.py --seed 0 --out runs/lookahead/init

`small_model.py`, one folder up, says what is special about the weights.
"""

from tokenizer import build_tokenizer

from agent_r1.examples.small_model import Sizes, main

SIZES = Sizes(hidden=128, layers=3, heads=4, ffn=256)

if __name__ == "__main__":
    main(__doc__, build_tokenizer, SIZES)
