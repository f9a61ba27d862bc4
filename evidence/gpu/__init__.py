"""One command that turns a GPU machine into evidence: `python evidence/gpu/run.py`."""
