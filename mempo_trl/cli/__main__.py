import sys

from mempo_trl.cli import main


sys.exit(main())
