"""`python -m service.delivery <socket>`: started by a worker only (service/delivery/child.py)."""

import sys

from service.delivery.process import run, survive

if __name__ == "__main__":
    survive()
    run(int(sys.argv[1]))
