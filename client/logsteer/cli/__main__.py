"""`python -m logsteer.cli`."""

import sys

from logsteer.cli import main

sys.exit(main())
