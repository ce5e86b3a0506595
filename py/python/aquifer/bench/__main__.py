"""`python -m aquifer.bench`."""

import sys

from . import main

sys.exit(main())
