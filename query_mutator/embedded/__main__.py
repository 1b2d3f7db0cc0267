"""`python -m query_mutator.embedded`: the embedded server in its own process."""

import sys

from query_mutator.commands.embedded import main

sys.exit(main())
