"""`python -m service.cli …`: the same as `headrace …`, for processes that the command line starts itself."""

from service.cli import main

main()
