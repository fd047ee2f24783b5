"""`python -m shardline` is the shardline command."""

import sys

from shardline.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
