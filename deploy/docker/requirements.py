"""Print the packages of an image: the dependencies of pyproject.toml and those of some extras.

Usage: `python requirements.py PYPROJECT "EXTRA ..." "PROVIDED ..."`, while an image is built and
before anything is installed. What the image below provides is left out.
"""

import re
import sys
import tomllib
from pathlib import Path

file, extras, provided = sys.argv[1:]
project = tomllib.loads(Path(file).read_text())["project"]
wanted: list[str] = project["dependencies"] + [
    line for extra in extras.split() for line in project["optional-dependencies"][extra]
]
missing = [line for line in wanted if re.split(r"[^\w.-]", line)[0] not in provided.split()]
sys.stdout.write("\n".join(missing) + "\n")
