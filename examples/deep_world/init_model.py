"""Write the initialized model directory that the warm start trains: stock Qwen2, seeded.

    python examples/deep_world/init_model.py --seed 0 --out runs/deep_world/init

`small_model.py`, one folder up, says what is special about the weights.
"""

from tokenizer import build_tokenizer

from agent_r1.examples.small_model import Sizes, main

SIZES = Sizes(hidden=160, layers=4, heads=5, ffn=320)

if __name__ == "__main__":
    main(__doc__, build_tokenizer, SIZES)
