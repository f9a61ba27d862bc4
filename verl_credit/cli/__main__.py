import sys

from verl_credit.cli import main

sys.exit(main())
