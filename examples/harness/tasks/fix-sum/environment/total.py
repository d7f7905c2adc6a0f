"""Print the sum of the arguments."""

import sys

total = 0
for text in sys.argv[1:]:
    total = int(text)
print(total)
