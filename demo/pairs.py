"""Prints contrast pairs of happy and sad stories as JSON lines, for `logsteer vectors train`."""

import argparse
import json
from random import Random

from corpus import story


def main() -> None:
    """Print as many pairs as were asked for: the same story in both moods, a seed each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=40)
    for seed in range(parser.parse_args().count):
        pair = {"positive": story(Random(seed), "happy"), "negative": story(Random(seed), "sad")}
        print(json.dumps(pair))


if __name__ == "__main__":
    main()
