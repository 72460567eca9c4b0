"""Keeps the interpreted tests out of ordinary processes; ``test_interpreted.py`` runs them."""

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
