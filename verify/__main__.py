"""`python -m bsearch.verify`: the same as `bsearch verify`, for machines that hold little more than torch."""

import sys

from ..cli import main

if __name__ == "__main__":
    main(["verify", *sys.argv[1:]], prog_name="python -m bsearch")
