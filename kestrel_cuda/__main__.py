"""`python -m kestrel_cuda`: the same program as the command."""

from kestrel_cli.app import main

main()
