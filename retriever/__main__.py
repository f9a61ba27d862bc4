"""`python -m verl_credit_retriever` is the command line."""

import sys

from .cli import main

sys.exit(main())
