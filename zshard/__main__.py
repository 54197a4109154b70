"""``python -m zshard`` is the command ``zshard``."""

import sys

from .cli import main

sys.exit(main())
