"""What holds for every test, before any heavy library is imported."""

import os

# The user's own settings must not decide what is tested.
for name in ("AREAL_BLOCK", "AREAL_DEBUG_MODE", "AREAL_HOME"):
    os.environ.pop(name, None)

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A model or data set that is not on disk is an error at once, not a wait for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
