"""`python -m logsteer.cli`."""

import sys

from logsteer.cli.command import main

sys.exit(main())
