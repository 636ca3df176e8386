"""`python -m bsearch.verify`: the same as `bsearch verify`, for machines that hold little more than torch."""

from ..cli import verify

if __name__ == "__main__":
    verify(prog_name="python -m bsearch.verify")
